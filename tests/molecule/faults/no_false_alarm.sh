#!/usr/bin/env bash
# Runs the whole story N times (default 10) without any fault and counts the findings that are warnings or errors: there must be none.
# For the two hosts of the scenario, which must be there: tests/molecule/faults/no_false_alarm.sh [N]
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RUNS=${1:-10}
: "${TEST_SSH_CONFIG:?run it by way of molecule, or name the ssh configuration of the hosts}"
# What other work on this machine makes true is no false alarm.
SURROUNDINGS=${FAULTS_SURROUNDINGS:-host-busy other-training memory-tight}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export ANSIBLE_COLLECTIONS_PATH=$HERE/../../../.ansible/collections ANSIBLE_PIPELINING=1 ANSIBLE_STDOUT_CALLBACK=default NO_COLOR=1
export ANSIBLE_SSH_ARGS="-F $TEST_SSH_CONFIG -o ControlMaster=auto -o ControlPersist=60s" ANSIBLE_INTERPRETER_PYTHON=auto_silent
unset ANSIBLE_CONFIG

alarms=0
for number in $(seq "$RUNS"); do
    begun=$SECONDS
    if ! ansible-playbook nanochat.ddp.train -i "$HERE/inventory" -e ddp_fresh=true -e ddp_iterations=30 -e ddp_results_dir="$results" \
        -e preflight_file="$results/findings.json" >"$results/log" 2>&1; then
        cat "$results/log"
        alarms=$((alarms + 1))
    fi
    found=$(python3 - "$results" "$SURROUNDINGS" <<'PYTHON'
import json, pathlib, sys
folder, surroundings = pathlib.Path(sys.argv[1]), sys.argv[2].split()
judged = [folder / "findings.json", *folder.glob("*/prediction.json")]
if len(judged) < 2 or not judged[0].exists():
    print("preflight or the rehearsal left no findings at all")
for path in filter(pathlib.Path.exists, judged):
    for one in json.loads(path.read_text())["findings"]:
        if one["severity"] != "info" and one["code"] not in surroundings:
            print(one["code"], one["host"], one["seen"])
for path in folder.glob("*/doctor.json"):
    print("the doctor was called:", json.loads(path.read_text())["verdict"]["seen"])
PYTHON
)
    [ -z "$found" ] || alarms=$((alarms + 1))
    echo "run $number of $RUNS: $((SECONDS - begun)) s, ${found:-no finding}"
    rm -rf "${results:?}"/*
done
echo "$alarms false alarms in $RUNS runs"
[ "$alarms" = 0 ]
