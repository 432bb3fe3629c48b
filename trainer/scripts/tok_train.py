# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Train the tokenizer on the training shards.

    python -m scripts.tok_train --vocab-size 32768

Reads the shards of $NANOCHAT_DATA_DIR (all but the last) and writes $NANOCHAT_BASE_DIR/tokenizer/, whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from nanochat.data import dataset, tokenizer
from nanochat.kit.common import data_dir, exit_code, tokenizer_dir, writable_folder
from nanochat.kit.settings import check_least


class Meter:
    """Counts the texts read in training."""

    def __init__(self, max_chars: int, doc_cap: int) -> None:
        self.max_chars, self.doc_cap = max_chars, doc_cap
        self.documents, self.characters = 0, 0

    def cut(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts, each cut at doc_cap characters, until max_chars are reached."""
        for text in texts:
            piece = text[: self.doc_cap]
            self.documents += 1
            self.characters += len(piece)
            yield piece
            if self.characters > self.max_chars:
                return


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.tok_train", description="Train the tokenizer.")
    parser.add_argument("--max-chars", type=int, default=2_000_000_000, help="maximum characters to train on")
    parser.add_argument("--doc-cap", type=int, default=10_000, help="maximum characters per document")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens, special ones included")
    args = parser.parse_args(argv)
    check_least(args, max_chars=1, doc_cap=1, vocab_size=1)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    paths = dataset.split_paths(data_dir(), "train")
    dataset.inspect(paths)
    folder = tokenizer_dir()
    writable_folder(folder.parent, "the tokenizer")
    meter, begun = Meter(args.max_chars, args.doc_cap), time.perf_counter()
    trained = tokenizer.train(meter.cut(dataset.texts(paths)), args.vocab_size)
    tokenizer.save(trained, folder)
    print(
        f"trained {trained.vocab_size} tokens on {meter.characters} characters of {meter.documents} documents "
        f"in {time.perf_counter() - begun:.1f} s, saved to {folder}"
    )
    if trained.vocab_size < args.vocab_size:
        print(f"the text has too few distinct words for {args.vocab_size} tokens; the model uses the smaller number")


if __name__ == "__main__":
    sys.exit(exit_code(main))
