#!/usr/bin/env bash
# Records docs/transcript.md: what a user types and sees on the way from two empty hosts to a trained model and back. The hosts are
# containers of this machine that differ in what home machines differ in (users, folders, NIC names, sudo, a firewall on
# one), reached by ssh; everything is shown as it was printed on a terminal, but for the folder of this checkout.
#     tests/molecule/record_transcript.sh [PAGE]
set -Eeuo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tests/molecule/terminal.sh
. "$ROOT/tests/molecule/terminal.sh"
PAGE=$(realpath "${1:-$ROOT/docs/transcript.md}")
NETWORK=ddp-transcript
SUBNET=10.89.78
HOSTS=(desktop laptop)
begin_page

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
finish_page
