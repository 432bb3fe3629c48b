#!/usr/bin/env bash
# Runs molecule's scenarios: all of them, or those named. Called by `./test.sh molecule`, which provides the tools.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
HERE=$ROOT/tests/molecule

need_packages podman runc netavark aardvark-dns debootstrap openssh-client
export CONTAINERS_CONF=$HERE/containers.conf

TEST_IMAGE=$("$HERE/image.sh")
TEST_SSH_KEY=$CACHE/molecule-key
TEST_SSH_CONFIG=$CACHE/molecule-ssh-config
[ -f "$TEST_SSH_KEY" ] || ssh-keygen -q -t ed25519 -N '' -C nanochat-ddp-tests -f "$TEST_SSH_KEY"
cat >"$TEST_SSH_CONFIG" <<CONFIG
Host *
    IdentityFile $TEST_SSH_KEY
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 10
CONFIG
export TEST_IMAGE TEST_SSH_KEY TEST_SSH_CONFIG

scenarios=("$@")
if [ ${#scenarios[@]} = 0 ]; then
    for path in "$HERE"/*/molecule.yml; do scenarios+=("$(basename "$(dirname "$path")")"); done
fi
cd "$ROOT/tests"
passed=0
for name in "${scenarios[@]}"; do
    say "-- molecule scenario $name"
    molecule --base-config "$HERE/base.yml" test --scenario-name "$name" || die "molecule scenario $name failed."
    passed=$((passed + 1))
    say "-- molecule scenario $name passed, ${SECONDS} s since the start of the scenarios"
done
echo "$passed passed, 0 failed"
