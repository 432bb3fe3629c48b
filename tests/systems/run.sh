#!/usr/bin/env bash
# Plays README's two commands, and ./test.sh lint:all,unit, in bare systems as debootstrap makes them, as a user with sudo whose machine
# has nothing but apt: tests/systems/run.sh SUITE... Each ends with a line PLAYED, by which ./test.sh systems tells what ran.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
need_packages debootstrap podman runc catatonit netavark aardvark-dns git
need_python
export CONTAINERS_CONF=$ROOT/tests/molecule/containers.conf
DEBIAN=${NANOCHAT_DDP_DEBIAN_MIRROR:-http://deb.debian.org/debian}
UBUNTU=${NANOCHAT_DDP_UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}
IMAGE=localhost/nanochat-ddp-bare
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT

# make_image SUITE: made again once a week, since a suite moves on.
make_image() {
    local week options=("$1" "$FOLDER/root" "$DEBIAN")
    week=$(date +%G-%V)
    [ "$(podman image inspect --format '{{ index .Labels "week" }}' "$IMAGE:$1" 2>/dev/null)" = "$week" ] && return
    case $1 in
        # Debian's debootstrap has neither the name of a later Ubuntu nor its key.
        noble) options=(--no-check-gpg "--components=main,universe" "$1" "$FOLDER/root" "$UBUNTU" /usr/share/debootstrap/scripts/gutsy) ;;
    esac
    say "Making a bare $1 ..."
    debootstrap --variant=minbase "${options[@]}" >"$CACHE/bare-$1.log" 2>&1 || { tail -n 20 "$CACHE/bare-$1.log" >&2; return 1; }
    # A mirror may hold a list of packages for longer than the list says that it is valid.
    echo 'Acquire::Check-Valid-Until "false";' >"$FOLDER/root/etc/apt/apt.conf.d/90-mirror"
    tar -C "$FOLDER/root" -c . | podman import --change "LABEL week=$week" - "$IMAGE:$1" >/dev/null
    rm -rf "$FOLDER/root"
}

# What this machine's pip is told (a certificate, an index, a folder of wheels) holds in the systems too, in a file that every pip
# reads: ansible-test clears the environment of its own. Sets PIP to podman's options.
pip_settings() {
    local name value
    printf '[global]\n' >"$FOLDER/pip.conf"
    PIP=()
    while read -r name value; do
        if [ "${value:0:1}" = / ]; then
            PIP+=(-v "$value:/machine/$name:ro")
            value=/machine/$name
        fi
        printf '%s = %s\n' "$name" "$value" >>"$FOLDER/pip.conf"
    done < <("$PYTHON" -m pip config list | sed -nE "s/^[^ ]*\.(cert|default-timeout|find-links|index-url|proxy)='(.*)'$/\1 \2/p" | sort -u -k 1,1)
    mkdir -p "$CACHE/pip-of-systems"
    PIP+=(-v "$FOLDER/pip.conf:/etc/pip.conf:ro" -v "$CACHE/pip-of-systems:/pip" -e PIP_CACHE_DIR=/pip)
}

play() {
    local index=auto
    "$PYTHON" -c 'import urllib.request as r; r.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=5)' 2>/dev/null || index=default
    podman run --rm --init --name "ddp-system-$1-$$" --hostname "$1" --cap-add AUDIT_WRITE,SYS_PTRACE "${PIP[@]}" -e "INDEX=$index" \
        -v "$FOLDER/source:/source:ro" -v "$ROOT/tests/systems/inside.sh:/inside.sh:ro" "$IMAGE:$1" bash /inside.sh
}

git -C "$ROOT" bundle create -q "$FOLDER/source" HEAD
pip_settings
for suite in "$@"; do
    make_image "$suite" || die "debootstrap could not make $suite; its last words are above, all of them in $CACHE/bare-$suite.log."
    say "-- bare $suite"
    play "$suite" || die "README's commands or the tests failed in a bare $suite."
done
