#!/usr/bin/env bash
# Records docs/transcript-mixed.md: three hosts that have little in common, from an inventory of three lines to a trained model. The hosts are
# those of the scenario mixed, on a network of their own, two of them with a part of a processor only.
#     tests/molecule/mixed/record_transcript.sh [PAGE]
set -Eeuo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=tests/molecule/terminal.sh
. "$ROOT/tests/molecule/terminal.sh"
"$MOLECULE/mixed/images.sh"
PAGE=$(realpath "${1:-$ROOT/docs/transcript-mixed.md}")
NETWORK=ddp-transcript-mixed
# As in the scenario: the image of cellar lets nobody in but its neighbour.
SUBNET=10.89.79
HOSTS=(attic cellar desk)
begin_page

# make_host NAME NUMBER RELEASE CPUS USER...: the users get the controller's key.
make_host() {
    local name=$NETWORK-$1 user
    podman run -d --init --name "$name" --hostname "$1" --network "$NETWORK:ip=$SUBNET.$2" --cpus "$4" --tmpfs "/tmp:rw,noexec,mode=1777" \
        --cap-add NET_ADMIN,NET_RAW,SYS_PTRACE,AUDIT_WRITE "localhost/nanochat-ddp-mixed:$3" >/dev/null
    for user in "${@:5}"; do
        podman exec --user "$user" "$name" sh -c "cd && mkdir -m 700 .ssh && echo '$(cat "$TEST_SSH_KEY.pub")' >.ssh/authorized_keys"
    done
}

make_hosts() {
    remove_hosts
    podman network create --subnet "$SUBNET.0/24" "$NETWORK" >/dev/null
    make_host attic 11 bullseye 0.3 lzw
    make_host cellar 12 bookworm 0.6 xiaoxin
    make_host desk 13 trixie 1.0 lzw
    mkdir -p "$SITE/group_vars"
    cat >"$SITE/hosts" <<INVENTORY
[trainers]
attic   ansible_host=$SUBNET.11  ansible_user=lzw      ansible_port=2222
cellar  ansible_host=$SUBNET.12  ansible_user=xiaoxin  ansible_ssh_common_args='-J lzw@$SUBNET.13'
desk    ansible_host=$SUBNET.13  ansible_user=xiaoxin  ansible_password='not a secret'
INVENTORY
    cat >"$SITE/group_vars/trainers.yml" <<SETTINGS
ddp_run: three
# The packages are in the images: no host here reaches an index.
ddp_venv_dir: /opt/trainer-venv
ddp_threads: 1
# A small model, so that it is all over in some minutes.
ddp_depth: 3
ddp_aspect_ratio: 32
ddp_head_dim: 32
ddp_sequence: 256
ddp_total_batch: 6144
ddp_vocab_size: 2048
ddp_iterations: 120
ddp_save_every: 60
ddp_eval_tokens: 2048
SETTINGS
}

make_hosts
write "# Three unequal hosts" "" \
    "What is typed and seen, recorded on a terminal by \`tests/molecule/mixed/record_transcript.sh\`. The hosts are containers of one machine with 0.3, 0.6 and 1.0" \
    "of its processors: Debian 11 with fish and another ssh port, Debian 12 with zsh, a home folder with a blank and a way in through the third one only, and" \
    "Debian 13 with a password instead of a key. All train with Python 3.11 and the packages of their images." "" \
    "## The inventory" "" '```ini' "$(cat "$SITE/hosts")" '```' "" "and the settings, \`inventory/group_vars/trainers.yml\`:" "" '```yaml' "$(cat "$SITE/group_vars/trainers.yml")" '```' "" "## Train" ""
watch_and_look 90
write "## Once more" "" "Nothing is left to do." ""
enter "ansible-playbook train.yml -i inventory"
write "## Go on, and take everything back" ""
enter "ansible-playbook train.yml -i inventory --tags restart -e ddp_iterations=180"
enter "ansible-playbook nanochat.ddp.reset -i inventory"
finish_page
