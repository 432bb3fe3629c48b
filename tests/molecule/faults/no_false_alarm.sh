#!/usr/bin/env bash
# Runs the whole story N times (default 10) without any fault and counts the runs with an alarm: there must be none.
# For the two hosts of the scenario, which must be there: tests/molecule/faults/no_false_alarm.sh [N]
# FAULTS_RUNS names a file that keeps a line of JSON of each run, for table.py.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RUNS=${1:-10}
: "${TEST_SSH_CONFIG:?run it by way of molecule, or name the ssh configuration of the hosts}"
KEPT=${FAULTS_RUNS:-/dev/null}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export ANSIBLE_COLLECTIONS_PATH=$HERE/../../../.ansible/collections ANSIBLE_PIPELINING=1 ANSIBLE_STDOUT_CALLBACK=default NO_COLOR=1
export ANSIBLE_SSH_ARGS="-F $TEST_SSH_CONFIG -o ControlMaster=auto -o ControlPersist=60s" ANSIBLE_INTERPRETER_PYTHON=auto_silent
unset ANSIBLE_CONFIG

alarms=0
for number in $(seq "$RUNS"); do
    begun=$SECONDS code=0
    ansible-playbook nanochat.ddp.train -i "$HERE/inventory" -e ddp_fresh=true -e ddp_iterations=30 -e ddp_results_dir="$results" \
        -e preflight_file="$results/findings.json" >"$results/log" 2>&1 || code=$?
    seconds=$((SECONDS - begun))
    [ "$code" = 0 ] || cat "$results/log"
    python3 "$HERE/alarms.py" "$results" "$seconds" "$code" >"$results/run.json" || alarms=$((alarms + 1))
    cat "$results/run.json" >>"$KEPT"
    echo "run $number of $RUNS: $(cat "$results/run.json")"
    rm -rf "${results:?}"/*
done
echo "$alarms false alarms in $RUNS runs"
[ "$alarms" = 0 ]
