#!/usr/bin/env bash
# Static checks. Called by `./test.sh lint`, which provides the tools; $1 is the trainer's environment. With $2, the environment of galaxy-importer,
# also those that take long and seldom find what the others do not.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${NANOCHAT_DDP_HOME:?run ./test.sh lint}
TRAINER_VENV=$1
IMPORTER=${2:-}
cd "$ROOT"
if [ -n "$IMPORTER" ]; then LESS_LINT=() LESS_SANITY=(); else LESS_LINT=(--exclude tests/molecule) LESS_SANITY=(--skip-test pylint); fi

step() { printf -- '-- %s\n' "$*" >&2; }

step "shellcheck"
mapfile -t scripts < <(git ls-files -co --exclude-standard | xargs grep -lE '^#!.*\b(ba)?sh$|^# shellcheck shell=bash' 2>/dev/null)
shellcheck -x "${scripts[@]}"

step "ruff"
ruff check .
ruff format --check .

step "yamllint"
yamllint -s .

step "words"
python tools/check_words.py

# What mypy has read of libraries is kept from one checkout to the next.
READ=$CACHE/mypy

step "mypy: plugins"
COLLECTIONS=$ROOT/.ansible/collections
(cd "$COLLECTIONS" && MYPYPATH=$COLLECTIONS mypy --cache-dir "$READ/collection" --config-file "$ROOT/pyproject.toml" ansible_collections/nanochat/ddp/plugins)

step "mypy: trainer"
# From its own folder, in which the trainer is found when it runs; hosts may have Python 3.10.
(cd trainer && "$TRAINER_VENV/bin/python" -m mypy --cache-dir "$READ/trainer" --config-file ../pyproject.toml --python-version 3.10 nanochat scripts)

step "mypy: tests, benches and tools"
# Fakes and plain dicts stand in for the collection's types; the trainer's tests do without.
checked=(tests/unit tests/integration tests/cores tests/pins tests/testinfra tools bench)
(cd "$COLLECTIONS" && MYPYPATH=$COLLECTIONS mypy --cache-dir "$READ/collection" --config-file "$ROOT/tests/mypy.ini" --disable-error-code arg-type \
    "${checked[@]/#/ansible_collections/nanochat/ddp/}")
(cd tests/trainer && MYPYPATH=$ROOT/trainer "$TRAINER_VENV/bin/python" -m mypy --cache-dir "$READ/trainer-tests" --config-file ../mypy.ini .)

step "ansible-lint"
ANSIBLE_CONFIG=ansible.cfg ansible-lint --offline -q "${LESS_LINT[@]}"

# The remaining tools want a path that really ends in ansible_collections/nanochat/ddp: a copy of what git knows. Tests, benches and tools, which
# no playbook runs and ruff and mypy have read, are left out: they would double the time of sanity.
TREE=$CACHE/sanity/ansible_collections/nanochat/ddp
rm -rf "$CACHE/sanity"
mkdir -p "$TREE"
known() { git ls-files -coz --exclude-standard --deduplicate -- "$@"; }
{ known . ':!tests' ':!bench' ':!tools' && known tests/sanity; } | while IFS= read -r -d '' path; do
    if [ -e "$path" ]; then printf '%s\0' "$path"; fi
done | tar --null -T - -c | tar -C "$TREE" -x
git -C "$TREE" init -q
git -C "$TREE" add -Af

step "antsibull-changelog"
(cd "$TREE" && antsibull-changelog lint)

step "antsibull-docs"
# Filters are for the roles alone and have no pages.
mv "$TREE/plugins/filter" "$CACHE/sanity/filter"
(cd "$TREE" && antsibull-docs lint-collection-docs --plugin-docs .)
mv "$CACHE/sanity/filter" "$TREE/plugins/filter"

step "ansible-test sanity"
python "$ROOT/tools/pip_for_ansible_test.py"
# Without pyenv's shims, which answer to names of Pythons that they cannot run.
(cd "$TREE" && PATH=$(printf '%s' "$PATH" | tr : '\n' | grep -v '/shims$' | paste -sd:) ansible-test sanity --local --color no "${LESS_SANITY[@]}")

step "ansible-galaxy collection build"
ansible-galaxy collection build --force --output-path "$CACHE/build" . >/dev/null

[ -n "$IMPORTER" ] || exit 0
step "galaxy-importer"
# Only the checks of an upload to Galaxy that were not made above.
printf '%s\n' '[galaxy-importer]' 'RUN_ANSIBLE_LINT = False' 'RUN_ANSIBLE_TEST = False' 'RUN_FLAKE8 = False' 'CHECK_CHANGELOG = True' >"$CACHE/importer.cfg"
artifact=$CACHE/build/nanochat-ddp-$(sed -n 's/^version: //p' galaxy.yml).tar.gz
failed() { tail -n 20 "$CACHE/importer.log" >&2; exit 1; }
(cd "$CACHE/build" && GALAXY_IMPORTER_CONFIG=$CACHE/importer.cfg PATH=$IMPORTER/bin:$PATH python -m galaxy_importer.main "$artifact") \
    >"$CACHE/importer.log" 2>&1 || failed
# The one ignored line of sanity is the link by which the checkout finds itself; filters and roles are internal and have no pages.
usual='Ignore files skip ansible-test sanity|Could not get role description|ansible-doc --type filter'
if grep -E '^(WARNING|ERROR)' "$CACHE/importer.log" | grep -vE "$usual"; then failed; fi
