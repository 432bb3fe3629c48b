# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Train the tokenizer on the training shards.

    python -m scripts.tok_train --vocab-size 32768

Reads the shards of $NANOCHAT_DATA_DIR (all but the last) and writes $NANOCHAT_BASE_DIR/tokenizer/, whole or not at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

from nanochat.data import dataset, tokenizer
from nanochat.kit.common import data_dir, exit_code, tokenizer_dir, writable_folder
from nanochat.kit.settings import Parser, at_least


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m scripts.tok_train", description="Train the tokenizer.")
    parser.add_argument("--max-chars", type=at_least(1), default=2_000_000_000, help="maximum characters to train on")
    parser.add_argument("--doc-cap", type=at_least(1), default=10_000, help="maximum characters per document")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens, special ones included")
    args = parser.parse_args(argv)
    paths = dataset.split_paths(data_dir(), "train")
    dataset.inspect(paths)
    folder = tokenizer_dir()
    writable_folder(folder.parent, "the tokenizer")
    documents, characters, begun = 0, 0, time.perf_counter()

    def pieces() -> Iterator[str]:
        """The texts, each cut at doc_cap characters, until max_chars are reached."""
        nonlocal documents, characters
        for text in dataset.texts(paths):
            documents, characters = documents + 1, characters + len(text[: args.doc_cap])
            yield text[: args.doc_cap]
            if characters > args.max_chars:
                return

    trained = tokenizer.train(pieces(), args.vocab_size)
    tokenizer.save(trained, folder)
    print(
        f"trained {trained.vocab_size} tokens on {characters} characters of {documents} documents "
        f"in {time.perf_counter() - begun:.1f} s, saved to {folder}"
    )
    if trained.vocab_size < args.vocab_size:
        print(f"the text has too few distinct words for {args.vocab_size} tokens; the model uses the smaller number")


if __name__ == "__main__":
    sys.exit(exit_code(main))
