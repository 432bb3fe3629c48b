# shellcheck shell=bash
# Sourced by run.sh and measure_rerun.sh: the image of a host, and the key and settings by which ssh reaches one.
MOLECULE=$ROOT/tests/molecule

need_packages podman runc catatonit netavark aardvark-dns debootstrap openssh-client
export CONTAINERS_CONF=$MOLECULE/containers.conf

TEST_IMAGE=$("$MOLECULE/image.sh")
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
