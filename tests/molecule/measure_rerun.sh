#!/usr/bin/env bash
# Measures how long a user waits on 2 and on 8 hosts (or as many as are named): for a second `ansible-playbook train.yml` that has
# nothing to do, for `--tags restart` until every rank made its first step, and for the status. Hosts are containers of this machine,
# reached by ssh.
#     tests/molecule/measure_rerun.sh [HOSTS...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"
export ANSIBLE_CONFIG=$ROOT/ansible.cfg ANSIBLE_SSH_ARGS="-F $TEST_SSH_CONFIG -o ControlMaster=auto -o ControlPersist=60s" NO_COLOR=1
NETWORK=ddp-measure
FOLDER=$(mktemp -d)
trap 'remove_hosts; rm -rf "$FOLDER"' EXIT

remove_hosts() {
    local names
    names=$(podman ps -aq --filter "name=^$NETWORK-")
    # shellcheck disable=SC2086
    [ -z "$names" ] || podman rm -f -t 1 $names >/dev/null
    podman network rm -f "$NETWORK" >/dev/null 2>&1 || true
}

# make_hosts COUNT: containers and the inventory of them.
make_hosts() {
    local number name key
    remove_hosts
    podman network create --subnet 10.89.77.0/24 "$NETWORK" >/dev/null
    key=$(cat "$TEST_SSH_KEY.pub")
    printf 'trainers:\n  hosts:\n' >"$FOLDER/hosts.yml"
    for number in $(seq "$1"); do
        name=$NETWORK-$number
        podman run -d --init --name "$name" --network "$NETWORK:ip=10.89.77.$((10 + number))" --cap-add NET_ADMIN,NET_RAW,AUDIT_WRITE "$TEST_IMAGE-trained" >/dev/null
        podman exec --user lzw "$name" sh -c "mkdir -m 700 ~/.ssh && echo '$key' >~/.ssh/authorized_keys"
        printf '    host%s: {ansible_host: 10.89.77.%s, ansible_user: lzw}\n' "$number" "$((10 + number))" >>"$FOLDER/hosts.yml"
    done
    cat >>"$FOLDER/hosts.yml" <<VARS
  vars:
    {ddp_depth: 2, ddp_aspect_ratio: 16, ddp_head_dim: 32, ddp_sequence: 64, ddp_total_batch: $((128 * $1)), ddp_device_batch: 2, ddp_vocab_size: 512,
     ddp_eval_every: -1, ddp_eval_tokens: $((128 * $1)), ddp_threads: 1, ddp_venv_dir: /opt/trainer-venv, ddp_results_dir: $FOLDER/runs}
VARS
}

# play WORDS...: a playbook and its options.
play() { ansible-playbook -i "$FOLDER/hosts.yml" "$@" >"$FOLDER/log" 2>&1 || { tail -n 30 "$FOLDER/log" >&2; die "$1 failed."; }; }

# timed WORDS...: the seconds that the playbook takes.
timed() {
    local begin=$EPOCHREALTIME
    play "$@"
    awk -v begin="$begin" -v end="$EPOCHREALTIME" 'BEGIN { printf "%.1f", end - begin }'
}

echo "$(nproc) cores for all hosts and the controller; load before: $(cut -d' ' -f1 /proc/loadavg)"
[ $# != 0 ] || set -- 2 8
for hosts in "$@"; do
    make_hosts "$hosts"
    first=$(timed "$ROOT/train.yml")
    again=$(timed "$ROOT/train.yml")
    grep -q 'changed: nothing' "$FOLDER/log" || die "The second run changed something: $(tail -n 1 "$FOLDER/log")"
    # More steps than anybody waits for, so that the restart that is measured finds a run in progress.
    restart=("$ROOT/train.yml" --tags restart -e watch=false -e ddp_iterations=1000000)
    play "${restart[@]}"
    restarted=$(timed "${restart[@]}")
    looked=$(timed nanochat.ddp.status)
    echo "$hosts hosts: from empty hosts to the end of a run $first s; again, without a change $again s;" \
        "--tags restart until the first step $restarted s; status of a run in progress $looked s"
done
