#!/usr/bin/env bash
# Random faults at random moments of random playbooks, on two container hosts reached by ssh.
#     tests/campaign/run.sh [--rounds 10] [--seed N] [--minutes 60] [--report FILE]
# campaign.py says what is tried and what must come out. CAMPAIGN_SUBNET=10.89.81 lets a second series run beside the first.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"
exec python "$ROOT/tests/campaign/campaign.py" "$@"
