#!/usr/bin/env bash
# Makes the images of three different hosts from those of the other scenarios: Debian 13 from its own packages, with the trainer's environment of the
# image of Debian 12, and its Python 3.11 beside its own, for which no package of PyTorch may be at hand. Prints what it made.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
need_packages debootstrap podman sshpass
TRAINED=${TEST_IMAGE:?run ./test.sh molecule:mixed}-trained
NAME=localhost/nanochat-ddp-mixed
MIRROR=${NANOCHAT_DDP_DEBIAN_MIRROR:-http://deb.debian.org/debian}
LOG=$CACHE/image-mixed.log
# They are made again when this file, or the image that they are made from, changes.
RECIPE=$( (cat "${BASH_SOURCE[0]}" && echo "$TRAINED") | sha256sum | cut -c1-12)
APT="apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends"
HOST_PACKAGES="openssh-server sudo python3 tmux iproute2 procps iputils-ping nftables ca-certificates"
USERS="useradd -m -s /bin/bash lzw && useradd -m -s /bin/bash xiaoxin && ssh-keygen -A && mkdir -p /run/sshd"

# build HOST: an image from the lines on standard input.
build() {
    podman build --network host --label "recipe=$RECIPE" --tag "$NAME:$1" --file - \
        --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume /etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro "$EMPTY"
}

attic() {
    build attic <<CONTAINERFILE
FROM $TRAINED
RUN $APT fish && chsh -s /usr/bin/fish lzw && echo 'Port 2222' >>/etc/ssh/sshd_config
CONTAINERFILE
}

cellar() {
    build cellar <<CONTAINERFILE
FROM $TRAINED
RUN $APT zsh && chsh -s /usr/bin/zsh xiaoxin && usermod -m -d '/home/xiao xin' xiaoxin && echo 'AllowUsers xiaoxin@10.89.79.13' >>/etc/ssh/sshd_config
CONTAINERFILE
}

desk() {
    local root=$CACHE/image-root-mixed
    if ! podman image exists "$NAME-base:trixie"; then
        rm -rf "$root"
        debootstrap --variant=minbase --include=ca-certificates trixie "$root" "$MIRROR"
        tar -C "$root" -c . | podman import - "$NAME-base:trixie"
        rm -rf "$root"
    fi
    build desk <<CONTAINERFILE
FROM $TRAINED AS trained
FROM $NAME-base:trixie
RUN $APT $HOST_PACKAGES && $USERS && echo 'xiaoxin:not a secret' | chpasswd
COPY --from=trained /usr/bin/python3.11 /usr/bin/python3.11
COPY --from=trained /usr/lib/python3.11 /usr/lib/python3.11
COPY --from=trained /opt/trainer-venv /opt/trainer-venv
RUN ln -sf /usr/bin/python3.11 /opt/trainer-venv/bin/python3
CMD ["/usr/sbin/sshd", "-D", "-e"]
CONTAINERFILE
}

EMPTY=$(mktemp -d)
trap 'rm -rf "$EMPTY"' EXIT
for host in attic cellar desk; do
    [ "$(podman image inspect --format '{{ index .Labels "recipe" }}' "$NAME:$host" 2>/dev/null)" = "$RECIPE" ] && continue
    $host >"$LOG" 2>&1 || { tail -n 20 "$LOG" >&2; die "The image of $host could not be made; the last words are above, all of them in $LOG."; }
    echo "$NAME:$host"
done
