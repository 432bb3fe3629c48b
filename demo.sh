#!/usr/bin/env bash
# Trains a small model on two nodes on this machine, from nothing. Further arguments go to ansible-playbook.
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools/bootstrap.sh"

cd "$ROOT"
need_controller
code=0
ansible-playbook train.yml -i inventory -e ddp_fresh=true "$@" || code=$?
[ "$code" != 0 ] || say "Talk to the model (in $ROOT): $VENV/bin/ansible-playbook nanochat.ddp.chat -i inventory"
say "The commands of README.md need ansible-playbook, which the demo keeps to itself: export PATH=$VENV/bin:\$PATH"
exit "$code"
