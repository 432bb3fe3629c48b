#!/usr/bin/env bash
# Makes the images of three different hosts from those of the other scenarios: Debian 11 and 13 from their own packages, with the trainer's
# environment of the image of Debian 12. Debian 11 has no Python that is new enough, Debian 13 one for which no package of PyTorch may be at
# hand; both get Debian 12's Python 3.11 beside their own, on Debian 11 with the libraries that it was built for. Prints what it made: images.sh [RELEASE]...
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

# build RELEASE: an image from the lines on standard input.
build() {
    podman build --network host --label "recipe=$RECIPE" --tag "$NAME:$1" --file - \
        --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume /etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro "$EMPTY"
}

# base RELEASE: the bare system.
base() {
    local root=$CACHE/image-root-mixed
    podman image exists "$NAME-base:$1" && return
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates "$1" "$root" "$MIRROR"
    tar -C "$root" -c . | podman import - "$NAME-base:$1"
    rm -rf "$root"
}

bullseye() {
    base bullseye
    build bullseye <<CONTAINERFILE
FROM $TRAINED AS trained
RUN $APT patchelf && mkdir /libraries && cp /usr/bin/python3.11 / \
    && for file in /usr/bin/python3.11 /usr/lib/python3.11/lib-dynload/*.so; do ldd \$file; done | awk '\$3 ~ "^/" { print \$3 }' | sort -u | xargs cp -Lt /libraries \
    && dpkg -L libc6 | grep '^/lib/.*\.so' | xargs cp -Lt /libraries && cp -L /lib64/ld-linux-x86-64.so.2 /libraries \
    && for library in libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libm.so.6; do patchelf --add-needed \$library /python3.11; done \
    && patchelf --force-rpath --set-rpath /opt/bookworm /python3.11 && patchelf --set-interpreter /opt/bookworm/ld-linux-x86-64.so.2 /python3.11
FROM $NAME-base:bullseye
RUN $APT $HOST_PACKAGES fish && $USERS && chsh -s /usr/bin/fish lzw && echo 'Port 2222' >>/etc/ssh/sshd_config
COPY --from=trained /libraries /opt/bookworm
COPY --from=trained /python3.11 /usr/bin/python3.11
COPY --from=trained /usr/lib/python3.11 /usr/lib/python3.11
COPY --from=trained /opt/trainer-venv /opt/trainer-venv
RUN ln -sf /usr/bin/python3.11 /opt/trainer-venv/bin/python3
CMD ["/usr/sbin/sshd", "-D", "-e"]
CONTAINERFILE
}

bookworm() {
    build bookworm <<CONTAINERFILE
FROM $TRAINED
RUN $APT zsh && chsh -s /usr/bin/zsh xiaoxin && usermod -m -d '/home/xiao xin' xiaoxin && echo 'AllowUsers xiaoxin@10.89.79.13' >>/etc/ssh/sshd_config
CONTAINERFILE
}

trixie() {
    base trixie
    build trixie <<CONTAINERFILE
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
[ $# != 0 ] || set -- bullseye bookworm trixie
for release in "$@"; do
    [ "$(podman image inspect --format '{{ index .Labels "recipe" }}' "$NAME:$release" 2>/dev/null)" = "$RECIPE" ] && continue
    $release >"$LOG" 2>&1 || { tail -n 20 "$LOG" >&2; die "The image of $release could not be made; the last words are above, all of them in $LOG."; }
    echo "$NAME:$release"
done
