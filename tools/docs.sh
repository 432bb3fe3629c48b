#!/usr/bin/env bash
# Builds the docs site into $NANOCHAT_DDP_HOME/docs/html without a warning: the pages of docs/, and every module, inventory
# and callback plugin from its own documentation. Called by `./test.sh docs`, which provides the tools.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUT=${NANOCHAT_DDP_HOME:?run ./test.sh docs}/docs
SOURCE=$OUT/source
cd "$ROOT"
rm -rf "$OUT"
mkdir -p "$SOURCE/collections"
# Pages and pictures at their paths of the repository, so that links between them hold.
cp docs/site/conf.py docs/site/index.md galaxy.yml ./*.md "$SOURCE"
cp -r docs lab "$SOURCE"
rm -r "$SOURCE/docs/site"
# Without filters, which only the roles use.
COPY=$OUT/collections/ansible_collections/nanochat/ddp
mkdir -p "$COPY/plugins"
cp -rL galaxy.yml README.md meta roles "$COPY"
cp -rL plugins/{callback,doc_fragments,inventory,module_utils,modules} "$COPY/plugins"
ANSIBLE_COLLECTIONS_PATH=$OUT/collections antsibull-docs --config-file docs/site/antsibull-docs.cfg \
    collection --use-current --squash-hierarchy --dest-dir "$SOURCE/collections" --fail-on-error nanochat.ddp
sphinx-build -q -W --keep-going -j 1 -b html "$SOURCE" "$OUT/html"
echo "docs: $(find "$OUT/html" -name '*.html' | wc -l) pages in $OUT/html"
