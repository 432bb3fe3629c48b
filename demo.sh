#!/usr/bin/env bash
# Trains a small model on two nodes on this machine, from nothing: ./demo.sh [--storm] [ARGUMENT OF ansible-playbook]...
# With --storm a rank is killed and a node freezes on the way, and both come back.
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools/bootstrap.sh"

# The storm's run restarts by itself, goes on without a lost node, and is long enough for both to come back.
STORM_STEPS=1500
STORM=(-e ddp_run=storm -e "ddp_iterations=$STORM_STEPS" -e ddp_restarts=3 -e ddp_min_hosts=1 -e ddp_grace=2 -e ddp_sample_every=-1)

main() {
    local code=0 run=demo
    if [ "${1:-}" = --storm ]; then
        shift
        set -- "${STORM[@]}" "$@"
        run=storm
    fi
    cd "$ROOT"
    need_controller
    if [ $run = storm ]; then
        python tools/storm.py "$CACHE/node2/runs/storm" --steps $STORM_STEPS &
        # Not local: the trap comes after this function.
        storm=$!
        trap 'kill $storm 2>/dev/null || true' EXIT
    fi
    ansible-playbook train.yml -i inventory -e ddp_fresh=true "$@" || code=$?
    [ "$code" = 0 ] || exit "$code"
    printf "\n"
    "$CACHE/trainer-venv/bin/python" tools/demo_result.py "$CACHE/node1/runs/$run"
    next_steps $run
}

next_steps() {
    printf '\nNext, in %s:\n  export PATH=%s/bin:%s\n' "$ROOT" "$VENV" "\$PATH"
    printf '  %-60s # %s\n' \
        "ansible-playbook nanochat.ddp.chat -e ddp_run=$1" "continue text" \
        "ansible-playbook train.yml -e ddp_run=$1 -e ddp_stage=sft" "make it answer" \
        "ansible-playbook nanochat.ddp.status" "state, speed" \
        "./demo.sh --storm" "kills a rank"
    printf 'Open runs/%s/report.html in a browser. Your own machines: docs/start.md.\n' "$1"
}

main "$@"
