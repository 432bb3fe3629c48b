#!/usr/bin/env bash
# In a bare system, as root: makes a user with sudo, and plays as that one what README says.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends git sudo; } >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
    # Some systems bring a user with the first number.
    useradd -m -u 1234 -s /bin/bash lzw
    echo 'lzw ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/lzw
    chown lzw /pip
    exec su lzw -c "bash $0"
fi

cd
git clone -q /source nanochat.ddp
cd nanochat.ddp
began=$SECONDS
./demo.sh -e "ddp_torch=2.13.0$([ "$INDEX" = default ] && echo +cuda)"
demo=$((SECONDS - began))
began=$SECONDS
TORCH_INDEX=$INDEX ./test.sh lint:all,unit
tests=$((SECONDS - began))
# shellcheck source=/dev/null
system=$(. /etc/os-release && echo "$PRETTY_NAME")
controller=~/.cache/nanochat-ddp/controller/bin
core=$("$controller/ansible" --version | sed -n '1s/.*core \([^]]*\)].*/\1/p')
echo "PLAYED $system: Python $("$controller/python" -c 'import platform; print(platform.python_version())'), ansible-core $core, demo.sh in $demo s, test.sh lint:all,unit in $tests s"
