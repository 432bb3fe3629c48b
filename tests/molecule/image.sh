#!/usr/bin/env bash
# Makes the two container images that stand for a host. Both are kept in podman's store and made again only when what they
# are made from changes.
#   host     Debian from its own packages, with sshd, tmux, Python and every firewall
#   trained  the same with the trainer's environment in /opt/trainer-venv, for scenarios that are about something else
# Prints the name of the first one; the other has the tag with -trained behind it.
set -euo pipefail
CACHE=${NANOCHAT_DDP_HOME:?run ./test.sh molecule}
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=$(cat "${BASH_SOURCE[0]}" "$ROOT/trainer/requirements.txt" | sha256sum | cut -c1-12)
IMAGE=localhost/nanochat-ddp-host:$RECIPE
MIRROR=${NANOCHAT_DDP_DEBIAN_MIRROR:-http://deb.debian.org/debian}
PACKAGES="openssh-server sudo python3 python3-venv tmux iproute2 procps iputils-ping nftables iptables ufw firewalld dbus ca-certificates systemd-sysv libpam-systemd"

make_image() {
    # The host's own apt settings (a proxy, a mirror's certificate) hold for the image too while it is made.
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$MIRROR"
    tar -C "$root" -c . | podman import - "$IMAGE-base"
    podman build --network host --tag "$IMAGE" --file - --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume /etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro "$root/etc" <<CONTAINERFILE
FROM $IMAGE-base
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*
# The two users of the field: one with sudo, one without.
RUN useradd -m -s /bin/bash lzw && useradd -m -s /bin/bash xiaoxin && printf 'lzw ALL=(ALL) NOPASSWD: ALL\\n' >/etc/sudoers.d/lzw
# The keys stay in the image, so that a host is known by the time it starts.
RUN ssh-keygen -A && mkdir -p /run/sshd
# A host with systemd begins without a firewall, as the others do.
RUN systemctl disable firewalld ufw
CMD ["/usr/sbin/sshd", "-D", "-e"]
CONTAINERFILE
    podman rmi "$IMAGE-base"
}

if ! podman image exists "$IMAGE"; then
    echo "Making the image of a host (about two minutes, once) ..." >&2
    log=$CACHE/image.log
    root=$CACHE/image-root
    rm -rf "$root"
    make_image >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        echo "The image could not be made; the last words are above, all of them in $log." >&2
        exit 1
    }
    rm -rf "$root"
fi

# The wheels are fetched once by this machine, as an offline host gets them from its controller.
WHEELS=$CACHE/wheels-$(sha256sum "$ROOT/trainer/requirements.txt" | cut -c1-12)
TORCH_INDEX=https://download.pytorch.org/whl/cpu

fetch_wheels() {
    local arch platforms=() name
    arch=$(uname -m)
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux_2_5 manylinux1; do
        platforms+=(--platform "${name}_$arch")
    done
    # The image's Python, whichever this machine has. PyTorch's own index has the CPU builds; where it does not answer the default one serves.
    local pip=(python -m pip --timeout 5 --retries 0 download -q -d "$WHEELS.part" --only-binary=:all: --python-version 3.11 --implementation cp "${platforms[@]}")
    rm -rf "$WHEELS.part"
    "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$ROOT/trainer/requirements.txt")" || true
    "${pip[@]}" --find-links "$WHEELS.part" -r "$ROOT/trainer/requirements.txt"
    mv "$WHEELS.part" "$WHEELS"
}

make_trained_image() {
    [ -d "$WHEELS" ] || fetch_wheels
    podman build --network none --tag "$IMAGE-trained" --file - --volume "$WHEELS:/wheels:ro" --volume "$ROOT/trainer/requirements.txt:/requirements.txt:ro" "$WHEELS" <<CONTAINERFILE
FROM $IMAGE
RUN python3 -m venv /opt/trainer-venv && /opt/trainer-venv/bin/pip install -q --no-index --find-links /wheels -r /requirements.txt
CONTAINERFILE
}

if ! podman image exists "$IMAGE-trained"; then
    echo "Adding the trainer's environment to it (about two minutes, once) ..." >&2
    make_trained_image >"$CACHE/image-trained.log" 2>&1 || {
        tail -n 20 "$CACHE/image-trained.log" >&2
        echo "The environment could not be added; the last words are above, all of them in $CACHE/image-trained.log." >&2
        exit 1
    }
fi
echo "$IMAGE"
