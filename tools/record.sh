#!/usr/bin/env bash
# Records what README.md and docs/ show, from real runs: tools/record.sh [pictures|transcripts]; without an argument all.
# pictures: the terminal of `./demo.sh --storm`, the report of `./demo.sh` in a browser, and a talk with its model
# (docs/chat.md). transcripts: a whole job on containers (docs/transcript.md), as root, with podman.
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
    convert "$2" +dither -colors 128 "$2"
}

# talk COMMAND PAGE: asks the model the questions below, and replaces what the page shows of the last talk.
talk() {
    local question head
    head=$(sed '/^```text$/q' "$2")
    tmux -L record -f /dev/null new-session -d -x 150 -y 500 "NO_COLOR=1 $1"
    for question in "Hello!" "Who are you?" "What is a checkpoint?" "What is the capital of Japan?" "What is two plus three?" "/quit"; do
        until seen | tail -n 1 | grep -qx '> *'; do sleep 0.5; done
        tmux -L record send-keys -l "$question"
        sleep 0.5
        [ "$question" = /quit ] || tmux -L record send-keys Enter
    done
    # What came before the model's own first line is the playbook's.
    printf '%s\n' "$head" "\$ ${1%% -e *}" "$(seen | sed -n '/^Step /,$p' | hide_paths)" '```' >"$2"
    tmux -L record kill-server
}
seen() { tmux -L record capture-pane -p | sed 's/ *$//' | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'; }
hide_paths() { sed -e "s#$ROOT#~/nanochat.ddp#g" -e "s#$CACHE#~/.cache/nanochat-ddp#g" -e "s#$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')#/usr/lib/python3#g" -e "s#$HOME#~#g"; }

# film FILE COMMAND...: the terminal while the commands run, as an animated SVG of twice the speed; no screen stays longer than a second.
# It begins with the screen on which the run ended, for pages that do not move.
film() {
    local svg=$1 folder command
    shift
    folder=$(mktemp -d)
    for command in "$@"; do printf "printf '$ %%s\\n' %q\n%s\n" "$command" "$command"; done >"$folder/commands"
    # Its input must not end before they do.
    exec 3< <(exec sleep infinity)
    termtosvg record "$folder/real" -g 118x30 -c "bash $folder/commands" <&3
    kill $!
    hide_paths <"$folder/real" | awk '
        NR == 1 { print; next }
        { match($0, /[0-9.]+/); at[NR] = substr($0, RSTART, RLENGTH) / 2; rest[NR] = substr($0, RSTART + RLENGTH) }
        /weights identical/ { end = NR }
        END {
            for (line = 2; line <= end; line++) print "[0" rest[line]
            print "[2, \"o\", \"\\u001b[H\\u001b[2J\"]"
            for (line = 2; line <= NR; line++) print "[" at[line] + 2.2 rest[line]
        }' >"$folder/fast"
    termtosvg render "$folder/fast" "$svg" -m 200 -M 1000 -D 6000 -t window_frame
    rm -r "$folder"
}

pictures() {
    need_packages chromium imagemagick
    need_python
    need_venv pictures "$ROOT/tools/requirements/pictures.txt"
    PATH=$PATH:$VENV/bin
    need_controller
    ./demo.sh
    shot "$ROOT/runs/demo/report.html" "$IMAGES/report.png" 1280 1400 --blink-settings=preferredColorScheme=1
    shot "$ROOT/runs/demo/report.html" "$IMAGES/report-phone-dark.png" 420 1400 --blink-settings=preferredColorScheme=0
    ansible-playbook train.yml -i inventory -e ddp_stage=sft
    talk "ansible-playbook nanochat.ddp.chat -i inventory -e temperature=0" "$ROOT/docs/chat.md"
    film "$IMAGES/storm.svg" './demo.sh --storm' "ansible-playbook nanochat.ddp.chat -i inventory -e ddp_run=storm -e '{\"prompt\": \"Once upon a time\"}'"
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
