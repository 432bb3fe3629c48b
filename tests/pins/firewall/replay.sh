#!/usr/bin/env bash
# Replays the pins of peer_firewall in containers; see replay.py. Needs root and podman.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"
exec python "$ROOT/tests/pins/firewall/replay.py" "$@"
