#!/usr/bin/env bash
# Records what README.md and docs/ show, from real runs: tools/record.sh [pictures|transcripts]; without an argument all.
# pictures: the terminal of `./demo.sh --storm`, the report of `./demo.sh` in a browser, and a talk with its model
# (docs/chat.md). transcripts: a whole job on containers (docs/transcript.md, the samples of docs/seeing.md), as root, with podman.
# Takes a quarter of an hour; other work on the machine shows in the figures.
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$ROOT"
IMAGES=$ROOT/docs/images

# shot PAGE FILE WIDTH HEIGHT [FLAG OF chromium]...
shot() {
    local profile
    profile=$(mktemp -d)
    chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync \
        --user-data-dir="$profile" --hide-scrollbars --screenshot="$2" --window-size="$3,$4" --virtual-time-budget=2000 "${@:5}" "file://$1" 2>/dev/null
    rm -rf "$profile"
    convert "$2" -colors 128 "$2"
}

pictures() {
    need_packages chromium imagemagick
    need_controller
    ./demo.sh
    shot "$ROOT/runs/demo/report.html" "$IMAGES/report.png" 1280 1400 --blink-settings=preferredColorScheme=1
    shot "$ROOT/runs/demo/report.html" "$IMAGES/report-phone-dark.png" 420 1400 --blink-settings=preferredColorScheme=0
    ansible-playbook train.yml -i inventory -e ddp_stage=sft
    python tools/record_chat.py -i inventory
    python tools/moving_picture.py "$IMAGES/storm.svg" './demo.sh --storm' \
        "ansible-playbook nanochat.ddp.chat -i inventory -e ddp_run=storm -e '{\"prompt\": \"import os\"}'"
}

transcripts() {
    tests/molecule/record_transcript.sh
    python3 tools/generate_docs.py
}

case ${1:-all} in
    pictures | transcripts) "$1" ;;
    all) pictures; transcripts ;;
    *) die "tools/record.sh [pictures|transcripts]" ;;
esac
