#!/usr/bin/env bash
# Makes the pictures of README.md and docs/ again, from real runs of the demo: the terminal of `./demo.sh --storm`, and the report of
# `./demo.sh` as a browser shows it on a desk and on a phone. Takes some minutes; other work on the machine shows in the figures.
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$ROOT"
IMAGES=$ROOT/docs/images
need_packages chromium imagemagick
need_controller

# shot FILE WIDTH HEIGHT [FLAG OF chromium]...
shot() {
    local profile
    profile=$(mktemp -d)
    chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync \
        --user-data-dir="$profile" --hide-scrollbars --screenshot="$1" --window-size="$2,$3" "${@:4}" "file://$ROOT/runs/demo/report.html" 2>/dev/null
    rm -rf "$profile"
    convert "$1" -colors 128 "$1"
}

./demo.sh
shot "$IMAGES/report.png" 1280 1400 --blink-settings=preferredColorScheme=1
shot "$IMAGES/report-phone-dark.png" 420 1400 --blink-settings=preferredColorScheme=0
python tools/moving_picture.py "$IMAGES/storm.svg" './demo.sh --storm' \
    "ansible-playbook nanochat.ddp.chat -i inventory -e ddp_run=storm -e '{\"prompt\": \"import os\"}'"
