#!/usr/bin/env bash
# Records docs/transcript.md: what a user types and sees on the way from two empty hosts to a trained model and back. The hosts are
# containers of this machine that differ in what home machines differ in (users, folders, NIC names, sudo, a firewall on
# one), reached by ssh; everything is shown as it was printed on a terminal, but for the folder of this checkout.
#     tests/molecule/record_transcript.sh [PAGE]
set -Eeuo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
need_packages bsdutils
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"
PAGE=$(realpath "${1:-$ROOT/docs/transcript.md}")
NETWORK=ddp-transcript
SUBNET=10.89.78
HOSTS=(desktop laptop)
FOLDER=$(mktemp -d)
SITE=$FOLDER/inventory
WRITTEN=$FOLDER/page.md
export ANSIBLE_CONFIG=$ROOT/ansible.cfg ANSIBLE_SSH_ARGS="-F $TEST_SSH_CONFIG -o ControlMaster=auto -o ControlPersist=60s" NO_COLOR=1 LC_ALL=C.UTF-8
trap '[ -n "${KEEP:-}" ] || remove_hosts; rm -rf "$FOLDER"' EXIT
trap 'say "The recording failed at line $LINENO."; cat "$FOLDER"/*.screen >&2 || true' ERR

remove_hosts() {
    podman rm -f -i -t 1 "${HOSTS[@]/#/$NETWORK-}" >/dev/null
    podman network rm -f "$NETWORK" >/dev/null 2>&1 || true
}

write() { printf '%s\n' "$@" >>"$WRITTEN"; }

# shown FILE: the final state of the terminal; a redrawn line shows its last state.
shown() {
    sed -e 's/\r$//' -e 's/.*\r\x1b\[K//' -e 's/\x1b\[[0-9;?]*[A-Za-z]//g' -e "s#$ROOT#~/nanochat.ddp#g" -e "s#$SITE#inventory#g" -e '/^Script \(started\|done\) on/d' "$1"
}

# on_terminal FILE COMMAND: runs it as in a terminal of 150 columns; all that was printed goes into the file.
on_terminal() { (cd "$ROOT" && script -q -f -e -c "stty cols 150 rows 50; ${2//-i inventory/-i $SITE}" "$1" >/dev/null </dev/null); }

# block PAGE COMMAND FILE: appends the command and its output to the page.
block() { { printf '```console\n$ %s\n' "$2"; shown "$3"; printf '```\n\n'; } >>"$1"; }

# enter_into PAGE COMMAND [CODE]: runs the command, expects this exit code (0), and appends the command and its output to the page.
enter_into() {
    local screen=$FOLDER/last.screen code=0
    say "\$ $2"
    on_terminal "$screen" "$2" || code=$?
    [ "$code" = "${3:-0}" ] || die "It ended with $code: $(shown "$screen")"
    block "$1" "$2" "$screen"
}

enter() { enter_into "$WRITTEN" "$@"; }

# at_step NUMBER FILE: the first line of progress that has come to it; nothing as long as none has.
at_step() {
    [ -s "$2" ] || return 1
    tr '\r' '\n' <"$2" | sed 's/\x1b\[[0-9;?]*[A-Za-z]//g' |
        awk -v least="$1" 'match($0, /step [0-9]+\//) && !seen && substr($0, RSTART + 5, RLENGTH - 6) + 0 >= least { print; seen = 1 } END { exit !seen }'
}

# watch_and_look: a whole training in one terminal, and in another one a look at it on its way.
watch_and_look() {
    local command="ansible-playbook train.yml -i inventory" screen=$FOLDER/train.screen live=""
    say "\$ $command"
    on_terminal "$screen" "$command" &
    until live=$(at_step "$1" "$screen"); do
        kill -0 $! 2>/dev/null || die "The training ended before step $1: $(shown "$screen")"
        sleep 0.2
    done
    enter_into "$FOLDER/meanwhile" "ansible-playbook nanochat.ddp.status -i inventory"
    wait $!
    block "$WRITTEN" "$command" "$screen"
    write "While it trained, the last line was drawn over and over:" "" '```text' "$live" '```' "" "and another terminal showed" ""
    cat "$FOLDER/meanwhile" >>"$WRITTEN"
}

# make_host NAME NUMBER NIC USER
make_host() {
    podman run -d --init --name "$NETWORK-$1" --hostname "$1" --network "$NETWORK:ip=$SUBNET.$2,interface_name=$3" \
        --cap-add NET_ADMIN,NET_RAW,SYS_PTRACE,AUDIT_WRITE "$TEST_IMAGE" >/dev/null
    podman exec --user "$4" "$NETWORK-$1" sh -c "mkdir -m 700 ~/.ssh && echo '$(cat "$TEST_SSH_KEY.pub")' >~/.ssh/authorized_keys"
}

make_hosts() {
    remove_hosts
    podman network create --subnet "$SUBNET.0/24" "$NETWORK" >/dev/null
    make_host desktop 11 enp4s0 lzw
    make_host laptop 12 wlp3s0 xiaoxin
    podman exec "$NETWORK-desktop" sh -c 'install -d -o lzw /mnt/data/nanochat && ufw allow 22/tcp && ufw --force enable' >/dev/null
    mkdir -p "$SITE"
    cat >"$SITE/hosts.yml" <<INVENTORY
trainers:
  hosts:
    desktop:
      ansible_host: $SUBNET.11
      ansible_user: lzw
      ddp_base_dir: /mnt/data/nanochat
    laptop:
      ansible_host: $SUBNET.12
      ansible_user: xiaoxin
      ddp_base_dir: ~/projects/nanochat
  vars:
    # One core each, of the two that they share.
    ddp_threads: 1
    # A small model, so that it is all over in a minute.
    ddp_depth: 2
    ddp_head_dim: 64
    ddp_sequence: 256
    ddp_total_batch: 4096
    ddp_vocab_size: 2048
    ddp_iterations: 100
    ddp_save_every: 25
    ddp_eval_tokens: 8192
INVENTORY
}

make_hosts
write "# From two empty hosts to a trained model" "" \
    "What is typed and seen, recorded on a terminal by \`tests/molecule/record_transcript.sh\`. The hosts are containers with nothing but a base" \
    "system, sshd, tmux and Python, reached by ssh; they share the two cores of one machine, so the speeds say nothing. The desktop has sudo and" \
    "active ufw, which lets in ssh alone; the laptop has neither. No host reaches a package index: the controller fetches the packages." "" \
    "## The inventory" "" '```yaml' "$(cat "$SITE/hosts.yml")" '```' "" "## Look before you leap" ""
enter "ansible-playbook nanochat.ddp.plan -i inventory"
enter "ansible-playbook nanochat.ddp.preflight -i inventory" 2
write "## Train" ""
watch_and_look 50
write "## The same again" "" "Everything is as it should be, so nothing is changed and nothing trained." ""
enter "ansible-playbook train.yml -i inventory"
write "## Go on for longer, and leave" "" "The run goes on from its newest checkpoint, and the command returns when the first step is made." ""
enter "ansible-playbook train.yml -i inventory -e ddp_iterations=20000 -e watch=false"
enter "ansible-playbook nanochat.ddp.stop -i inventory"
enter "ansible-playbook nanochat.ddp.status -i inventory"
write "## Take everything back" "" "Sessions and ports; data, checkpoints and the environment stay." ""
enter "ansible-playbook nanochat.ddp.reset -i inventory"
# One empty line at the end is enough.
sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' "$WRITTEN" >"$PAGE"
say "Written: $PAGE"
