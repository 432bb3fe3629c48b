#!/usr/bin/env bash
# Builds an execution environment with this collection by ansible-builder, and tries it: ansible-navigator runs nanochat.ddp.plan in it on
# two nodes. Called by `./test.sh ee`, which provides the tools in $1; what they need besides is podman and root.
#     EE_BASE=IMAGE ./test.sh ee      an image of your own with Python 3.11 and pip, of Debian or Ubuntu
# Without EE_BASE it is the Debian of the molecule tests, which needs no container registry.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
PATH=$1/bin:$PATH
NAME=localhost/nanochat-ddp-ee
CONTEXT=$CACHE/ee
export CONTAINERS_CONF=$ROOT/tests/molecule/containers.conf

need_packages podman runc catatonit netavark debootstrap
BASE=${EE_BASE:-$("$ROOT/tests/molecule/image.sh")}
rm -rf "$CONTEXT"
mkdir -p "$CONTEXT"
ansible-galaxy collection build --output-path "$CONTEXT" "$ROOT" >/dev/null
ARTIFACT=$(basename "$CONTEXT"/nanochat-ddp-*.tar.gz)

cat >"$CONTEXT/execution-environment.yml" <<DEFINITION
---
version: 3
images:
  base_image:
    name: $BASE
options:
  # Debian's own pip and packages.
  skip_pip_install: true
  package_manager_path: /usr/bin/apt-get
additional_build_files:
  - {src: $ARTIFACT, dest: collection}
dependencies:
  ansible_core: {package_pip: "$(grep ^ansible-core "$ROOT/tools/requirements/controller.txt")"}
  ansible_runner: {package_pip: "ansible-runner>=2.4,<3"}
  galaxy:
    collections:
      - {name: collection/$ARTIFACT, type: file}
additional_build_steps:
  prepend_base:
    - ENV DEBIAN_FRONTEND=noninteractive
    - RUN apt-get update && apt-get install -y --no-install-recommends python3-pip python3-venv && rm -rf /var/lib/apt/lists/*
  prepend_builder:
    - RUN apt-get update
  prepend_final:
    - RUN apt-get update
DEFINITION

say "-- ansible-builder build (some minutes the first time)"
# The host's certificates and apt settings (a mirror, a proxy) hold while the image is made, as for the images of the tests.
HOST="--network host --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume /etc/apt/apt.conf.d:/etc/apt/apt.conf.d:ro"
HOST+=" --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
(cd "$CONTEXT" && ansible-builder build --container-runtime podman --tag "$NAME" --extra-build-cli-args "$HOST" -v 2) >"$CONTEXT/build.log" 2>&1 ||
    { tail -n 30 "$CONTEXT/build.log" >&2; die "The execution environment could not be built; all that was said is in $CONTEXT/build.log."; }

say "-- ansible-navigator run nanochat.ddp.plan"
# It asks for this folder, which some machines lack; it is there for the run only.
[ -d /dev/mqueue ] || { as_root mkdir /dev/mqueue && trap 'as_root rmdir /dev/mqueue' EXIT; }
printf '%s\n' 'trainers:' '  hosts: {node1: , node2: }' \
    '  vars: {ansible_connection: local, ansible_python_interpreter: /usr/bin/python3, ddp_base_dir: "/tmp/{{ inventory_hostname }}"}' >"$CONTEXT/hosts.yml"
(cd "$CONTEXT" && ansible-navigator run nanochat.ddp.plan -i hosts.yml --mode stdout --eei "$NAME" --pull-policy never --container-engine podman \
    --log-file "$CONTEXT/navigator.log" --playbook-artifact-enable false) >"$CONTEXT/plan.log" 2>&1 ||
    { tail -n 30 "$CONTEXT/plan.log" >&2; die "The plan could not be made in the execution environment."; }
grep -q "Run d4 on 2 hosts" "$CONTEXT/plan.log" || die "The plan says something else: $(tail -n 5 "$CONTEXT/plan.log")"
say "The plan was made in $NAME ($(podman image inspect --format '{{.Size}}' "$NAME" | awk '{printf "%.0f MB", $1 / 1e6}'))."
