#!/usr/bin/env bash
# Sets up and runs the tests: ./test.sh [PART]...; without arguments what every change runs, `all` with what takes longer, too.
# A scenario of molecule alone: ./test.sh molecule:site; some tests: ./test.sh unit:tests/unit/plugins/action
# Parts at the same time, of which some one after the other: ./test.sh lint,unit+trainer
set -euo pipefail
# shellcheck source=tools/bootstrap.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools/bootstrap.sh"
cd "$ROOT"

# The checkout as a collection, for what must be imported as ansible_collections.nanochat.ddp.
COLLECTIONS=$ROOT/.ansible/collections
COLLECTION=$COLLECTIONS/ansible_collections/nanochat/ddp

# What is supported; README's table is checked against it (tests/unit/tools/test_matrix.py).
# ansible-core, and the Pythons that run it: the first one that this machine has plays it. The first line is that of the oldest.
CORES=("2.19 3.11 3.12 3.13" "2.20 3.12 3.13 3.14" "2.21 3.13 3.12 3.14" "2.22rc 3.13 3.14 3.15")
# What runs on hosts.
HOST_PYTHONS=(3.9 3.13)
# Systems as debootstrap makes them.
SYSTEMS=(bookworm trixie testing)

# Without arguments: three rows of parts at the same time, since most of them wait for processes and hosts half of their time.
EVERY_TIME=("integration,pins+trainer,cores,docs+lint,unit,molecule:site")
# `all` runs these behind it; the bare systems run lint:all.
THE_REST=("molecule:membership,molecule:no_sudo+storm,molecule:restart,molecule:firewalls,molecule:mixed,firewall_pins" "long,cores:all+systems")

need_tools() {
    need_packages shellcheck tcsh fish tmux iproute2 procps rsync nftables iptables
    need_python
    need_venv tools "$ROOT/tools/requirements/dev.txt"
    export PATH=$VENV/bin:$PATH
    unset ANSIBLE_CONFIG
}

# The trainer's own environment, made by the code that makes it on the hosts; and what the tests need beside it.
need_trainer_venv() {
    TRAINER_VENV=$CACHE/tests-venv
    local more=$ROOT/tools/requirements/trainer-tests.txt log=$CACHE/tests-venv.log
    {
        ANSIBLE_STDOUT_CALLBACK=minimal ansible localhost -m nanochat.ddp.agent -e "ansible_python_interpreter=$VENV/bin/python" \
            -a "{\"verb\": \"trainer_venv\", \"path\": \"$TRAINER_VENV\", \"packages\": [\"trainer\"], \"torch_index\": \"${TORCH_INDEX:-auto}\"}" &&
            # Not by uv, which does not read pip's settings.
            "$VENV/bin/python" -m pip --python "$TRAINER_VENV/bin/python" install --quiet -r "$more"
    } >"$log" 2>&1 || { cat "$log" >&2; die "The trainer's environment could not be made."; }
}

run_lint() {
    need_trainer_venv
    local importer=
    [ "${1:-}" != all ] || importer=$(need_venv importer "$ROOT/tools/requirements/importer.txt" && echo "$VENV")
    tools/lint.sh "$TRAINER_VENV" "$importer"
}

# TWICE: for tests of processes that wait for each other by the clock. What fails on a machine with other work is tried once more; it is named
# (RERUN), also if it passes then.
TWICE=(--reruns 1 -rR)
# Two files of tests at once, whose processes wait most of their time.
TWO_FILES=(-n 2 --dist loadfile)
real_processes() { "$1" -m pytest -q -m "${WHICH:-not long}" "${TWICE[@]}" --durations=10 --durations-min=20 "${@:2}"; }

run_unit() { (cd "$COLLECTION" && PYTHONPATH=$COLLECTIONS real_processes python "${1:-tests/unit}"); }

run_integration() {
    need_packages chromium openssh-server openssh-client
    # The tracker's test trains for real.
    need_trainer_venv
    (cd "$COLLECTION" && TRAINER_VENV=$TRAINER_VENV PYTHONPATH=$COLLECTIONS real_processes python "${TWO_FILES[@]}" "${1:-tests/integration}")
}

run_trainer() {
    need_packages gcc libc6-dev
    need_trainer_venv
    # One thread a process: the tests run several ranks on few cores.
    # Every tenth of the generated cases; FEWER=1 tries all 9,000.
    (cd "$ROOT" && FEWER=${FEWER:-10} OMP_NUM_THREADS=1 PYTHONPATH=trainer real_processes "$TRAINER_VENV/bin/python" "${TWO_FILES[@]}" "${1:-tests/trainer}")
}

# What the product does, as it was recorded: tests/pins/record.py TOPIC records it again.
run_pins() {
    need_trainer_venv
    (cd "$COLLECTION" && TRAINER_VENV=$TRAINER_VENV PYTHONPATH=$COLLECTIONS real_processes python "${1:-tests/pins}")
}

# The tests that cost more than they would show at every change, and more random schedules of keepers and answers of hostile hosts.
run_long() {
    (cd "$COLLECTION" && SCHEDULES=100000 PYTHONPATH=$COLLECTIONS python -m pytest -q tests/unit/plugins/module_utils/_keeper/test_membership.py)
    (cd "$COLLECTION" && NANOCHAT_DDP_CASES=5000 PYTHONPATH=$COLLECTIONS python -m pytest -q tests/unit/plugins/test_hostile_answers.py)
    WHICH=long run_unit tests/unit
    WHICH=long run_integration tests/integration
    WHICH=long run_trainer tests/trainer
}

# The docs site without a warning, and the licence of every file; apart from the other tools, whose requirements differ.
run_docs() {
    (
        need_venv docs-tools "$ROOT/docs/site/requirements.txt"
        # shellcheck disable=SC2030
        export PATH=$VENV/bin:$PATH
        tools/docs.sh
        reuse lint --lines
    )
}

# played WHAT HOW: a line of the second table at the end.
played() { printf '  %-36s %s\n' "$1" "$2" >>"$TABLE.played"; }

# tests_with NAME REQUIREMENT...: an environment of its own with pytest; sets VENV.
tests_with() {
    local requirements=$CACHE/$1.txt
    # Made again once a week, for new releases.
    printf '%s\n' "# $(date +%G-%V)" 'pytest>=8,<10' 'hypothesis>=6.100,<7' 'pytest-rerunfailures>=16,<17' "${@:2}" >"$requirements"
    need_venv "$1" "$requirements"
}

# core_tests VERSION TEST...: the tests under the newest release of an ansible-core; VERSION 2.22rc: also before there is one.
core_tests() {
    local version=${1%rc}
    tests_with "core-$version" "ansible-core>=$1,<2.$((${version#2.} + 1))"
    # shellcheck disable=SC2031
    env PATH="$VENV/bin:$PATH" PYTHONPATH="$COLLECTIONS" TRAINER_VENV="$TRAINER_VENV" "$VENV/bin/python" -m pytest -q "${TWICE[@]}" -p no:cacheprovider "${@:2}"
}

# The oldest and the newest ansible-core that this machine can run import all plugins and pass the tests of what they play; the newest one
# also trains. What runs on hosts passes its tests under the oldest Python there. With `all` every version does, and the next ansible-core
# that has no release yet.
run_cores() (
    need_trainer_venv
    cd "$COLLECTION"
    local line version pythons what own oldest='' newest=none
    own=$(python -c 'import importlib.metadata as m; print(*m.version("ansible-core").split(".")[:2], sep=".")')
    for line in "${CORES[@]}"; do
        # shellcheck disable=SC2086
        if [[ $line != *rc* ]] && (find_version ${line#* }); then newest=${line%% *} && oldest=${oldest:-$newest}; fi
    done
    for line in "${CORES[@]}"; do
        read -r version pythons <<<"$line"
        [[ ${1:-} == all || $version == "$oldest" || $version == "$newest" ]] || continue
        what="imports, actions, display, filters, inventory"
        # shellcheck disable=SC2086
        find_version $pythons || { played "ansible-core $version" "not here: no Python ${pythons// / or }"; continue; }
        if [[ ${1:-} != all && $version == "$own" && $version != "$newest" ]]; then
            played "ansible-core $version" "by ./test.sh unit and integration, whose tools have it"
            continue
        fi
        local tests=(tests/unit/plugins/{action,callback,filter,inventory,test_imports.py,test_private_names.py})
        if [ "${1:-}" = all ] || [ "$version" = "$newest" ]; then
            tests+=(tests/cores)
            what+=", a training"
        fi
        core_tests "$version" "${tests[@]}"
        played "ansible-core $("$CACHE/core-${version%rc}/bin/python" -c 'import platform, importlib.metadata as m; print(m.version("ansible-core"), "Python", platform.python_version())')" "$what"
    done
    for version in "${HOST_PYTHONS[@]}"; do
        [[ ${1:-} == all || $version == "${HOST_PYTHONS[0]}" ]] || continue
        find_version "$version" || { played "hosts with Python $version" "not here: no such Python"; continue; }
        host_tests "$version" "$newest"
        played "hosts with Python $("$VENV/bin/python" -c 'import platform; print(platform.python_version())')" "modules and module_utils"
    done
)

# host_tests VERSION CORE: what Ansible sends to a host, with that Python there. Of Ansible only its own part for hosts is imported.
host_tests() {
    local controllers
    tests_with "host-$1" 'PyYAML>=6,<7'
    mkdir -p "$CACHE/ansible-of-hosts"
    ln -sfn "$("$CACHE/core-$2/bin/python" -c 'import ansible; print(ansible.__path__[0])')" "$CACHE/ansible-of-hosts/ansible"
    mapfile -t controllers < <(grep -rlE 'ddp\.plugins(\.| import )(action|callback|filter|plugin_utils)|def test_.*\bagent\b' tests/unit/plugins/module{s,_utils})
    # Few random cases: another Python changes none of the decisions that they try.
    SCHEDULES=100 NANOCHAT_DDP_CASES=30 PYTHONPATH=$COLLECTIONS:$CACHE/ansible-of-hosts "$VENV/bin/python" -m pytest -q -m "not long" "${TWICE[@]}" -p no:cacheprovider "${controllers[@]/#/--ignore=}" \
        tests/unit/plugins/module{s,_utils}
}

# README's two commands in bare systems.
run_systems() {
    local system log
    log=$(mktemp)
    for system in "${@:-${SYSTEMS[@]}}"; do
        tests/systems/run.sh "$system" | tee "$log"
        played "$(sed -n 's/^PLAYED \([^:]*\):.*/\1/p' "$log")" "$(sed -n 's/^PLAYED [^:]*: //p' "$log")"
    done
    rm "$log"
}

# Random faults on three hosts in network namespaces, and the promises of docs/membership.md.
run_storm() {
    need_trainer_venv
    as_root "$TRAINER_VENV/bin/python" bench/storm.py --minutes "${STORM_MINUTES:-10}" ${STORM_SEED:+--seed "$STORM_SEED"}
}

# The scenario mixed trains on this machine, too.
run_molecule() {
    need_trainer_venv
    TRAINER_VENV=$TRAINER_VENV tests/molecule/run.sh "$@"
}

# What peer_firewall does to real firewalls, compared with what is pinned.
run_firewall_pins() { tests/pins/firewall/replay.sh; }

run_part() {
    case $1 in
        *:*) "run_${1%%:*}" "${1#*:}" ;;
        *) "run_$1" ;;
    esac
}

# tell PART SECONDS SECOND_ATTEMPTS|FAILED: a line of the table at the end.
tell() {
    local how=
    case $3 in
        0) ;;
        FAILED) how="  FAILED" ;;
        *) how="  $3 tests passed at the second attempt only" ;;
    esac
    printf '%6d s  %s%s\n' "$2" "$1" "$how" >>"$TABLE"
}

# run_row FOLDER PART...: one part after the other, also when one fails; what each has to say comes in one piece, when it is over.
run_row() {
    local folder=$1 part code begun again worst=0
    shift
    for part in "$@"; do
        begun=$SECONDS
        say "== $part begins, ${SECONDS} s since the start"
        # Apart from the `||`, in whose reach no failing command would end the part.
        set +e
        (set -e; run_part "$part") >"$folder/$part" 2>&1 </dev/null
        code=$?
        set -e
        [ $code = 0 ] || worst=1
        {
            flock 8
            cat "$folder/$part"
            say "== $part: $([ $code = 0 ] && echo passed || echo FAILED), ${SECONDS} s since the start"
            if [ $code = 0 ]; then again=$(grep -c '^RERUN ' "$folder/$part" || true); else again=FAILED; fi
            tell "$part" $((SECONDS - begun)) "$again"
        } 8>"$folder/output.lock"
        [ $code = 0 ] || echo "$part" >>"$folder/failed"
    done
    return $worst
}

# run_together PART,PART+PART...: rows of parts, all rows at the same time. What fails is kept, since the rest of `all` goes on.
FAILED=()
run_together() {
    local folder row pids=() failed=0
    folder=$(mktemp -d)
    # Each in a process group of its own, by which Ctrl-C ends it.
    set -m
    for row in ${1//+/ }; do
        # shellcheck disable=SC2086
        run_row "$folder" ${row//,/ } &
        pids+=($!)
    done
    set +m
    trap 'kill -- "${pids[@]/#/-}"; exit 130' INT TERM
    for row in "${pids[@]}"; do
        wait "$row" || failed=1
    done
    trap - INT TERM
    [ $failed = 0 ] || mapfile -t -O ${#FAILED[@]} FAILED <"$folder/failed"
    rm -r "$folder"
}

main() {
    local parts=("$@") together begun code # part is global: the trap names it after this function has ended
    [ ${#parts[@]} != 0 ] || parts=("${EVERY_TIME[@]}")
    [ "${parts[0]}" != all ] || parts=("${EVERY_TIME[@]}" "${THE_REST[@]}")
    TABLE=$(mktemp)
    : >"$TABLE.played"
    for together in "${parts[@]}"; do
        for part in ${together//[+,]/ }; do
            case $part in
                unit:* | integration:* | trainer:* | pins:*) ;;
                lint | lint:all | docs | unit | integration | trainer | pins | firewall_pins | long | storm | cores | cores:all | systems | systems:* | molecule | molecule:*) ;;
                *) die "There is no part called $part: lint, lint:all, docs, unit, integration, trainer, pins, firewall_pins, cores, cores:all, long, storm, systems, systems:SUITE, molecule, molecule:SCENARIO or all." ;;
            esac
        done
    done
    trap 'code=$?; cat "$TABLE" "$TABLE.played" >&2; rm "$TABLE" "$TABLE.played"; [ $code = 0 ] || say "FAILED: ${part:-set-up}"' EXIT
    need_tools
    for part in "${parts[@]}"; do
        say "== $part"
        case $part in
            *[+,]*) run_together "$part" ;;
            *)
                begun=$SECONDS
                run_part "$part"
                tell "$part" $((SECONDS - begun)) 0
                ;;
        esac
        say "== $part done, ${SECONDS} s since the start"
    done
    part=${FAILED[*]}
    [ -z "$part" ] || die "Failed: $part."
    say "All passed: ${parts[*]}."
}

main "$@"
