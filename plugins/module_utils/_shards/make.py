# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes what a data set lacks on its first host: shards from texts, and a tokenizer."""

from __future__ import annotations

import os
from typing import Dict, Sequence

from .._kit import bare
from .folder import ShardsError

SHARD, TOKEN_BYTES = "shard_00000.parquet", "tokenizer/token_bytes.pt"


def make_data(
    path: str,
    python: str,
    trainer_dir: str,
    vocab_size: int,
    texts: Sequence[str] = (),
    shards: int = 0,
    prose: bool = False,
    files: Sequence[str] = (),
    host: str = "",
    check: bool = False,
) -> Dict[str, bool]:
    """Make shards from texts, if these are its source, and train a tokenizer, unless they are there, or tell whether that would be done.

    prose: see scripts.make_shards. files: what was imported; in check mode it is not there yet.
    """
    there = {*files, *(name for name in (SHARD, TOKEN_BYTES) if os.path.exists(os.path.join(path, name)))}
    lacking = []
    if texts and SHARD not in there:
        out = [f"--out={path}", f"--shards={shards}", *(["--prose"] if prose else [])]
        lacking.append(("the text could not be made into shards", ["make_shards", *out, "--from", *texts]))
    if TOKEN_BYTES not in there:
        lacking.append(("no tokenizer could be trained", ["tok_train", f"--vocab-size={vocab_size}"]))
    environ = {"PYTHONPATH": trainer_dir, "NANOCHAT_DATA_DIR": path, "NANOCHAT_BASE_DIR": path}
    for failure, (script, *options) in [] if check else lacking:
        code, dummy, err = bare.run([python, "-m", f"scripts.{script}", *options], environ, trainer_dir)
        if code:
            why = (err.strip() or "no reason was given").splitlines()[-1]
            advice = f"this takes the trainer in {trainer_dir} and {python}; --tags trainer brings them"
            raise ShardsError(f"{host}: {failure}: {why} ({advice})")
    return {"changed": bool(lacking)}
