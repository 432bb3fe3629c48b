# shellcheck shell=bash
# Sourced behind tools/bootstrap.sh: the tools, the image of a host, and the key and settings by which ssh reaches one.
MOLECULE=$ROOT/tests/molecule

need_packages podman runc catatonit netavark aardvark-dns debootstrap openssh-client
need_python
need_venv tools "$ROOT/tools/requirements/dev.txt"
export PATH=$VENV/bin:$PATH
export CONTAINERS_CONF=$MOLECULE/containers.conf

# Scenarios that run at the same time share the image and the key.
once() { flock --close "$CACHE/image.lock" "$@"; }
TEST_IMAGE=$(once "$MOLECULE/image.sh")
TEST_SSH_KEY=$CACHE/molecule-key
TEST_SSH_CONFIG=$CACHE/molecule-ssh-config
once sh -c "[ -f '$TEST_SSH_KEY' ] || ssh-keygen -q -t ed25519 -N '' -C nanochat-ddp-tests -f '$TEST_SSH_KEY'"
cat >"$TEST_SSH_CONFIG.$$" <<CONFIG
Host *
    IdentityFile $TEST_SSH_KEY
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 10
CONFIG
mv "$TEST_SSH_CONFIG.$$" "$TEST_SSH_CONFIG"
export TEST_IMAGE TEST_SSH_KEY TEST_SSH_CONFIG
