# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shards and tokenizer that a data set lacks are made once; with a program in place of the trainer's Python."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.make import SHARD, TOKEN_BYTES, make_data

PYTHON = """#!/bin/sh
echo "$*" >> calls
test ! -e refuse || { echo Traceback; echo "too little text" >&2; exit 1; }
case $2 in
  scripts.make_shards) mkdir -p ../data; touch ../data/shard_00000.parquet ;;
  *) mkdir -p "$NANOCHAT_DATA_DIR/tokenizer"; touch "$NANOCHAT_DATA_DIR/tokenizer/token_bytes.pt" ;;
esac
"""


@pytest.fixture
def make(call, tmp_path):
    python, tools = tmp_path / "python", tmp_path / "tools"
    tools.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = {"path": str(tmp_path / "data"), "python": str(python), "trainer_dir": str(tools), "vocab_size": 300}
    text = {"texts": ["/books", "/more"], "shards": 4}
    return lambda check=False, **more: call(make_data, check, host="desktop", **given, **(more or text))


def test_shards_and_tokenizer_are_made_once(make, tmp_path):
    calls = tmp_path / "tools/calls"
    assert make(check=True)["changed"] and not calls.exists()
    assert make()["changed"] and not make()["changed"] and not make(check=True)["changed"]
    assert calls.read_text().splitlines() == [
        f"-m scripts.make_shards --out={tmp_path}/data --shards=4 --from /books /more",
        "-m scripts.tok_train --vocab-size=300",
    ]
    (tmp_path / "data" / TOKEN_BYTES).unlink()
    assert not make(check=True, files=[SHARD, TOKEN_BYTES])["changed"]
    # Of an imported data set only the tokenizer is made.
    assert make(files=[SHARD])["changed"] and len(calls.read_text().splitlines()) == 3


def test_the_last_words_of_what_failed_are_told(make, tmp_path):
    (tmp_path / "tools/refuse").touch()
    told = make()["msg"]
    assert told.startswith(
        "desktop: the text could not be made into shards: too little text (this takes the trainer in "
    )
    assert make(files=[SHARD])["msg"].startswith("desktop: no tokenizer could be trained: too little text (")
