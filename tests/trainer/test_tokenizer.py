# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tokenizer reads and writes upstream's files, and runs no code from a pickle."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.data import tokenizer
from nanochat.kit.common import UserError

GOLDEN = Path(__file__).parent / "golden/data/tokenizer"
TEXTS = ["the cat sat on the mat, the cat sat on the hat 12345 times\n"] * 50 + ["Grüße, 世界!"]


def test_bytes_of_tokens_are_upstreams(tokens: tokenizer.Tokenizer) -> None:
    kept = tokenizer.load_token_bytes(GOLDEN, 512)
    assert kept.dtype == torch.int32
    assert torch.equal(tokens.token_bytes(), kept)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokens: tokenizer.Tokenizer, text: str) -> None:
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert tokens.encode_documents([text], threads=1) == [[tokens.bos, *ids]]
    assert tokens.encode(text, bos=True) == [tokens.bos, *ids]
    # Special tokens in a text are text.
    assert tokens.bos not in tokens.encode(f"{text}<|bos|>")


def test_what_is_trained_here_is_a_plain_pickle_of_tiktoken(tmp_path: Path) -> None:
    trained = tokenizer.train(TEXTS, 285)
    # One that is there is replaced whole.
    for one in (tokenizer.train(TEXTS, 280), trained):
        tokenizer.save(one, tmp_path / "tokenizer")
    with (tmp_path / "tokenizer/tokenizer.pkl").open("rb") as file:
        theirs = pickle.load(file)
    assert isinstance(theirs, tiktoken.Encoding)
    assert theirs.n_vocab == trained.vocab_size == 285
    again = tokenizer.load(tmp_path / "tokenizer")
    text = "the cat 123 <|bos|> Grüße"
    assert again.encode(text) == theirs.encode_ordinary(text) == trained.encode(text)
    assert len(tokenizer.load_token_bytes(tmp_path / "tokenizer", 285)) == 285
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["token_bytes.pt", "tokenizer", "tokenizer.pkl"]


def test_at_most_two_digits_make_a_token() -> None:
    trained = tokenizer.train(["1234567890 " * 200], 400)
    pieces = [trained.decode([i]) for i in range(trained.vocab_size - 9)]
    assert max(sum(c.isdigit() for c in piece) for piece in pieces) == 2


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Evil()), "system, which a tokenizer does not need"),
        (pickle.dumps({"a": 1}), "not a tiktoken encoding"),
        (b"", "is not a tokenizer"),
        (b"\x80\x05garbage", "is not a tokenizer"),
        ((GOLDEN / "tokenizer.pkl").read_bytes()[:2000], "is not a tokenizer"),
    ],
)
def test_a_pickle_that_is_no_tokenizer_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.pkl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        tokenizer.load(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_missing_or_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train one with python -m scripts.tok_train"):
        tokenizer.load(tmp_path)
    with pytest.raises(UserError, match=r"token_bytes.pt, which the evaluation needs, cannot be read: .*No such file"):
        tokenizer.load_token_bytes(tmp_path, 512)
    torch.save(torch.zeros(7, dtype=torch.int32), tmp_path / "token_bytes.pt")
    with pytest.raises(UserError, match="does not match the tokenizer beside it, which has 512 tokens"):
        tokenizer.load_token_bytes(tmp_path, 512)
    (tmp_path / "token_bytes.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer.load_token_bytes(tmp_path, 512)


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="--vocab-size 264: must be at least 265"):
        tokenizer.train(TEXTS, 264)
