# shellcheck shell=bash
# Sourced by the scripts that record what is typed and seen: PAGE is written in the end, from WRITTEN in FOLDER; SITE is the folder of the inventory.
# HOSTS are containers on the network NETWORK.

# shellcheck source=tools/bootstrap.sh
. "$ROOT/tools/bootstrap.sh"
need_packages bsdutils
# shellcheck source=tests/molecule/env.sh
. "$ROOT/tests/molecule/env.sh"

begin_page() {
    FOLDER=$(mktemp -d)
    SITE=$FOLDER/inventory
    WRITTEN=$FOLDER/page.md
    export ANSIBLE_CONFIG=$ROOT/ansible.cfg ANSIBLE_SSH_ARGS="-F $TEST_SSH_CONFIG -o ControlMaster=auto -o ControlPersist=60s" NO_COLOR=1 LC_ALL=C.UTF-8
    trap '[ -n "${KEEP:-}" ] || remove_hosts; rm -rf "$FOLDER"' EXIT
    trap 'say "The recording failed at line $LINENO."; cat "$FOLDER"/*.screen >&2 || true' ERR
}

remove_hosts() {
    podman rm -f -i -t 1 "${HOSTS[@]/#/$NETWORK-}" >/dev/null
    podman network rm -f "$NETWORK" >/dev/null 2>&1 || true
}

write() { printf '%s\n' "$@" >>"$WRITTEN"; }

# shown FILE: the final state of the terminal; a redrawn line shows its last state.
shown() {
    sed -e 's/\r$//' -e 's/.*\r\x1b\[K//' -e 's/\x1b\[[0-9;?]*[A-Za-z]//g' -e "s#$ROOT#~/nanochat.ddp#g" -e "s#$SITE#inventory#g" -e '/^Script \(started\|done\) on/d' "$1"
}

# on_terminal FILE COMMAND: runs it as in a terminal of 150 columns; all that was printed goes into the file.
on_terminal() { (cd "$ROOT" && script -q -f -e -c "stty cols 150 rows 50; ${2//-i inventory/-i $SITE}" "$1" >/dev/null </dev/null); }

# block PAGE COMMAND FILE: appends the command and its output to the page.
block() { { printf '```console\n$ %s\n' "$2"; shown "$3"; printf '```\n\n'; } >>"$1"; }

# enter_into PAGE COMMAND [CODE]: runs the command, expects this exit code (0), and appends the command and its output to the page.
enter_into() {
    local screen=$FOLDER/last.screen code=0
    say "\$ $2"
    on_terminal "$screen" "$2" || code=$?
    [ "$code" = "${3:-0}" ] || die "It ended with $code: $(shown "$screen")"
    block "$1" "$2" "$screen"
}

enter() { enter_into "$WRITTEN" "$@"; }

# at_step NUMBER FILE: the first line of progress that has come to it; nothing as long as none has.
at_step() {
    [ -s "$2" ] || return 1
    tr '\r' '\n' <"$2" | sed 's/\x1b\[[0-9;?]*[A-Za-z]//g' |
        awk -v least="$1" 'match($0, /step [0-9]+\//) && !seen && substr($0, RSTART + 5, RLENGTH - 6) + 0 >= least { print; seen = 1 } END { exit !seen }'
}

# watch_and_look: a whole training in one terminal, and in another one a look at it on its way.
watch_and_look() {
    local command="ansible-playbook train.yml -i inventory" screen=$FOLDER/train.screen live=""
    say "\$ $command"
    on_terminal "$screen" "$command" &
    until live=$(at_step "$1" "$screen"); do
        kill -0 $! 2>/dev/null || die "The training ended before step $1: $(shown "$screen")"
        sleep 0.2
    done
    enter_into "$FOLDER/meanwhile" "ansible-playbook nanochat.ddp.status -i inventory"
    wait $!
    block "$WRITTEN" "$command" "$screen"
    write "While it trained, the last line was drawn over and over:" "" '```text' "$live" '```' "" "and another terminal showed" ""
    cat "$FOLDER/meanwhile" >>"$WRITTEN"
}

finish_page() {
    # One empty line at the end is enough.
    sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' "$WRITTEN" >"$PAGE"
    say "Written: $PAGE"
}
