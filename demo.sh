#!/usr/bin/env bash
# Trains a small model on two nodes on this machine, from nothing. Further arguments go to ansible-playbook.
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools/bootstrap.sh"

cd "$ROOT"
need_controller
ansible-playbook train.yml -i inventory -e ddp_fresh=true "$@"
echo "Talk to the model (in $ROOT): $(command -v ansible-playbook) nanochat.ddp.chat -i inventory"
