# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tokenizer: byte-pair encoding trained with rustbpe, used through tiktoken, kept in upstream's two files.

tokenizer.pkl is a pickled tiktoken.Encoding; token_bytes.pt holds the bytes of each token (0 for special ones).
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import rustbpe
import tiktoken
import torch

from nanochat.kit.common import DataError, UserError, disk_cause, first_line

BOS = "<|bos|>"
SPECIAL_TOKENS = (
    BOS,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
# GPT-4's pattern, but at most two digits per piece, to save a small vocabulary from numbers.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# tiktoken's stack ends at a million, and its panic would print more than our sentence.
MOST_BLANKS = 900_000
BLANKS = re.compile(rf"[^\S\r\n]{{{MOST_BLANKS}}}")
PICKLE_NAME, BYTES_NAME = "tokenizer.pkl", "token_bytes.pt"


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.bos = self.special(BOS)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including special ones."""
        return self.encoding.n_vocab

    def special(self, name: str) -> int:
        """The id of a special token."""
        try:
            return self.encoding.encode_single_token(name)
        except KeyError:
            raise DataError(f"the tokenizer has no special token {name}; train it with scripts.tok_train.") from None

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """The ids of a text; special tokens in it are treated as plain text."""
        [ids] = self._encoded([text], threads=1)
        return [self.bos, *ids] if bos else ids

    def encode_documents(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """The ids of many texts, each preceded by BOS."""
        return [[self.bos, *ids] for ids in self._encoded(texts, threads)]

    def _encoded(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        if any(len(text) >= MOST_BLANKS and BLANKS.search(text) for text in texts):
            raise DataError(
                f"a text cannot be tokenized (it has {MOST_BLANKS} blanks in a row); split it, or leave it out."
            )
        try:
            if len(texts) == 1:
                return [self.encoding.encode_ordinary(texts[0])]
            return self.encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        except (MemoryError, KeyboardInterrupt):
            raise
        # tiktoken panics on some texts, and a Rust panic is not an Exception.
        except BaseException as error:
            raise DataError(
                f"a text cannot be tokenized ({type(error).__name__}: {first_line(error)}); split it, or leave it out."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; incomplete characters become the replacement character."""
        return self.encoding.decode(list(ids))

    def token_bytes(self) -> torch.Tensor:
        """Bytes of each token, 0 for special ones, so that a loss per byte does not depend on the vocabulary."""
        special = {self.special(name) for name in self.encoding.special_tokens_set}
        single = self.encoding.decode_single_token_bytes
        sizes = [0 if i in special else len(single(i)) for i in range(self.vocab_size)]
        return torch.tensor(sizes, dtype=torch.int32)


class _EncodingState:
    """Replaces tiktoken.Encoding while unpickling; it only stores the pickle's content."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Allows only tiktoken's Encoding: a foreign tokenizer must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _EncodingState
        raise pickle.UnpicklingError(f"it loads {module}.{name}, which a tokenizer does not need")


def _unpickle(data: bytes) -> tiktoken.Encoding:
    found = _Unpickler(io.BytesIO(data)).load()
    state = found.state if isinstance(found, _EncodingState) else None
    if not isinstance(state, dict) or set(state) != {"name", "pat_str", "mergeable_ranks", "special_tokens"}:
        raise pickle.UnpicklingError("it is not a tiktoken encoding with its ranks")
    ranks, special = state["mergeable_ranks"], state["special_tokens"]
    if not all(isinstance(key, bytes) and isinstance(value, int) for key, value in ranks.items()):
        raise pickle.UnpicklingError("its ranks are not bytes to numbers")
    ids = [*ranks.values(), *special.values()]
    if sorted(ids) != list(range(len(ids))):
        raise pickle.UnpicklingError("its token ids have gaps or duplicates")
    return tiktoken.Encoding(state["name"], pat_str=state["pat_str"], mergeable_ranks=ranks, special_tokens=special)


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder."""
    path = folder / PICKLE_NAME
    try:
        return Tokenizer(_unpickle(path.read_bytes()))
    except OSError as error:
        why = error.strerror or error
        raise DataError(
            f"cannot read the tokenizer {path}: {why}; train one with python -m scripts.tok_train."
        ) from None
    except UserError:
        raise
    # A damaged pickle may raise almost anything, from EOFError to MemoryError; tiktoken raises ValueError.
    except Exception as error:
        raise DataError(
            f"{path} is not a tokenizer: {error}; copy it again or train a new one with scripts.tok_train."
        ) from None


def load_token_bytes(folder: Path, vocab_size: int) -> torch.Tensor:
    """Bytes of each token, from the file beside the tokenizer: upstream has counted some of them otherwise."""
    path = folder / BYTES_NAME
    try:
        sizes = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path}, which the evaluation needs, cannot be read: {first_line(error)}; copy it again or run scripts.tok_train."
        ) from None
    if not isinstance(sizes, torch.Tensor) or sizes.shape != (vocab_size,):
        raise DataError(
            f"{path} does not match the tokenizer beside it, which has {vocab_size} tokens; copy both again."
        )
    return sizes


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train merges on texts."""
    merges = vocab_size - len(SPECIAL_TOKENS)
    if merges < 256:
        raise DataError(
            f"--vocab-size {vocab_size}: must be at least {256 + len(SPECIAL_TOKENS)} "
            f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens)."
        )
    learner = rustbpe.Tokenizer()
    learner.train_from_iterator(iter(texts), merges, pattern=SPLIT_PATTERN)
    ranks = {bytes(piece): rank for piece, rank in learner.get_mergeable_ranks()}
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    pattern = learner.get_pattern()
    return Tokenizer(tiktoken.Encoding("rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write both files; the folder is created or replaced atomically."""
    fresh = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    former = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        (fresh / PICKLE_NAME).write_bytes(pickle.dumps(tokenizer.encoding))
        # torch would report a full disk in its own words.
        sizes = io.BytesIO()
        torch.save(tokenizer.token_bytes(), sizes)
        (fresh / BYTES_NAME).write_bytes(sizes.getvalue())
        if folder.exists():
            folder.rename(former)
        fresh.rename(folder)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot write the tokenizer to {folder}: {why}.", disk_cause(error)) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
