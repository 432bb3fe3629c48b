#!/usr/bin/env bash
# Runs molecule's scenarios: all of them, or those named. Called by `./test.sh molecule`, which provides the tools.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"

scenarios=("$@")
if [ ${#scenarios[@]} = 0 ]; then
    for path in "$MOLECULE"/*/molecule.yml; do scenarios+=("$(basename "$(dirname "$path")")"); done
fi
cd "$ROOT/tests"
passed=0
for name in "${scenarios[@]}"; do
    say "-- molecule scenario $name"
    molecule --base-config "$MOLECULE/base.yml" test --scenario-name "$name" || die "molecule scenario $name failed."
    passed=$((passed + 1))
    say "-- molecule scenario $name passed, ${SECONDS} s since the start of the scenarios"
done
echo "$passed passed, 0 failed"
