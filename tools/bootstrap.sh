# shellcheck shell=bash
# Sourced by demo.sh and test.sh: finds or installs what they need on a fresh Debian or Ubuntu machine.
# Everything that is downloaded or built is kept in the user's cache folder, so that the second run is quick.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${NANOCHAT_DDP_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/nanochat-ddp}
export NANOCHAT_DDP_HOME=$CACHE
mkdir -p "$CACHE"

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# need_packages NAME...: Debian packages, installed only if they are missing.
need_packages() {
    local missing=() name
    # Users are asked to install packages only once, so Python is named with the first missing ones.
    find_python || set -- "$@" python3 python3-venv
    for name in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || die "These packages are missing and this is no Debian or Ubuntu: ${missing[*]}. Install them and try again."
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        die "These packages are missing: ${missing[*]}. Install them with: sudo apt-get install ${missing[*]}"
    fi
    say "Installing ${missing[*]} ..."
    local log=$CACHE/apt.log
    # One installation at a time, and no sooner than the system's own is over; what the packages start must not keep our lock.
    {
        flock 9
        { as_root apt-get update && as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends \
            "${missing[@]}"; } >"$log" 2>&1 9>&- || { tail -n 20 "$log" >&2; die "apt-get could not install ${missing[*]}; its last words are above, all of them in $log."; }
    } 9>"$CACHE/packages.lock"
}

usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Sets PYTHON to an interpreter of 3.11 or newer that can make virtual environments.
find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13 python3.14; do
        if usable_python "$name"; then PYTHON=$name; return; fi
    done
    return 1
}

# find_version VERSION...: sets PYTHON to the first of these versions that there is, also among those of pyenv.
find_version() {
    local version path
    for version in "$@"; do
        for path in "python$version" ~/.pyenv/versions/"$version".*/bin/python; do
            if "$path" -c 'import venv, ensurepip' 2>/dev/null; then PYTHON=$path; return; fi
        done
    done
    return 1
}

need_python() {
    find_python && return
    need_packages python3 python3-venv
    find_python && return
    # Older releases have a newer Python beside their default one.
    need_packages python3.11 python3.11-venv
    find_python || die "No Python 3.11 or newer was found. Install one, with its venv module, and try again."
}

# need_venv NAME REQUIREMENTS: CACHE/NAME holds exactly these requirements; VENV is set to it.
need_venv() {
    VENV=$CACHE/$1
    local stamp log
    # Of this file and of those that it includes: another environment's requirements do not concern it.
    stamp=$(cd "$(dirname "$2")" && { cat "$2"; sed -n 's/^-r //p' "$2" | xargs -r cat; } | sha256sum | cut -c1-16)-$("$PYTHON" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')
    [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/stamp" 2>/dev/null)" = "$stamp" ] && return
    say "Installing $(basename "$2" .txt) requirements into $VENV ..."
    log=$CACHE/pip-$1.log
    {
        # One run at a time makes the environment; a half-made one is made again.
        flock 9
        if [ "$(cat "$VENV/stamp" 2>/dev/null)" != "$stamp" ]; then
            if ! { "$PYTHON" -m venv --clear "$VENV" && "$VENV/bin/python" -m pip install --disable-pip-version-check -q -r "$2"; } >"$log" 2>&1; then
                tail -n 20 "$log" >&2
                die "pip could not install $2; its last words are above, all of them in $log."
            fi
            printf '%s\n' "$stamp" >"$VENV/stamp"
        fi
    } 9>"$CACHE/$1.lock"
}

# What a controller needs, and the two local nodes of the default inventory.
need_controller() {
    need_packages tmux iproute2 procps
    need_python
    need_venv controller "$ROOT/tools/requirements/controller.txt"
    export PATH=$VENV/bin:$PATH
    # Named, since Ansible takes none by itself from a folder that everybody may write to, as on WSL's /mnt/c.
    export ANSIBLE_CONFIG=$ROOT/ansible.cfg
}
