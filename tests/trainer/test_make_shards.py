# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text becomes shards, and shards a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from nanochat.data import dataset, tokenizer
from nanochat.kit.common import exit_code
from scripts import make_shards, tok_train
from scripts.make_shards import cut

TRAINER = Path(__file__).resolve().parents[2] / "trainer"


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script's main as the command line would, without a new process and its import of torch."""

    def called(script: ModuleType, *arguments: object) -> Done:
        code = exit_code(lambda: script.main([str(argument) for argument in arguments]))
        return Done(code, *capsys.readouterr())

    return called


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    for i in range(120):
        (folder / "sub" / f"{i}.txt").write_text(f"document {i}\n" + "words and more words\n" * (i % 7))
    (folder / "long.txt").write_text("".join(f"line {i}\n" for i in range(3000)))
    (folder / "image.txt").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "zeros.txt").write_bytes(b"a\0b")
    (folder / "empty.txt").write_text(" \n")
    (folder / "other.md").write_text("not asked for")
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.txt").write_text("not asked for")
    (folder / "link.txt").symlink_to("/etc/passwd")
    return folder


def test_every_text_is_in_the_shards_once(run: Run, tmp_path: Path, text: Path) -> None:
    done = run(make_shards, "--from", text, "--out", tmp_path / "out", "--shards", 3, "--suffix", ".txt")
    assert done.code == 0, done.err
    assert "3 of 124 files are no readable UTF-8 text, or empty" in done.out
    shards = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in shards] == [f"shard_{i:05d}.parquet" for i in range(3)]
    found = list(dataset.texts(shards))
    whole = [(text / "sub" / f"{i}.txt").read_text() for i in range(120)]
    pieces = cut((text / "long.txt").read_text(), 10_000)
    assert sorted(found) == sorted(whole + pieces)
    assert all(pq.ParquetFile(path).num_row_groups >= 16 for path in shards)


def test_the_same_texts_give_the_same_bytes_in_any_folder(run: Run, tmp_path: Path, text: Path) -> None:
    run(make_shards, "--from", text, "--out", tmp_path / "one", "--shards", 2)
    (text / "sub").rename(tmp_path / "elsewhere")
    run(make_shards, "--from", tmp_path / "elsewhere", text, "--out", tmp_path / "two", "--shards", 2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len(digests(tmp_path / "one")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "{empty}", "--out", "{out}", "--shards", "2"], "gave 0 document(s) from 0 file(s), too few for 2"),
        (["--from", "{text}", "--out", "{out}", "--shards", "1000"], "too few for 1000 shards"),
        (["--from", "{text}", "--out", "{out}", "--shards", "1"], "--shards: 1 is less than 2"),
        (["--from", "{text}/none", "--out", "{out}", "--shards", "2"], "neither a file nor a folder"),
        (["--from", "{text}", "--out", "{text}", "--shards", "2"], "is not empty"),
        (["--from", "{text}", "--out", "{text}/long.txt/x", "--shards", "2"], "cannot write"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_leaves_nothing(
    run: Run, tmp_path: Path, text: Path, arguments: list[str], words: str
) -> None:
    places = {"empty": tmp_path / "empty", "text": text, "out": tmp_path / "out"}
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = run(make_shards, *[argument.format(**places) for argument in arguments])
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_tokenizer_is_trained_on_the_training_shards_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, texts in (("a", ["aaaa bbbb " * 20] * 20), ("b", ["qqqqqqqq " * 50] * 20)):
        pq.write_table(pa.table({"text": texts}), data / f"{name}.parquet")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DATA_DIR", str(data))
    done = run(tok_train, "--vocab-size", 268, "--max-chars", 500, "--doc-cap", 100)
    assert done.code == 0, done.err
    assert "trained 268 tokens on 600 characters of 6 documents" in done.out
    trained = tokenizer.load(tmp_path / "tokenizer")
    assert len(trained.encode("qqqq")) == 4
    assert len(trained.encode("aaaa")) < 4


def test_of_python_files_only_the_prose_is_taken(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "library"
    (folder / "test").mkdir(parents=True)
    said = "Return the larger of two numbers, or the first one if they are equal to each other."
    for n in range(4):
        (folder / f"m{n}.py").write_text(
            f'def f{n}(a, b):\n    """{said}\n\n    See number {n} of them."""\n    return "{"x=1;" * 40}"\n'
        )
    (folder / "test" / "t.py").write_text(f'"""{said} Not this."""\n')
    (folder / "broken.py").write_text("def (:\n")
    (folder / "notes.txt").write_text("def stays(): as it is\n")
    assert run(make_shards, "--from", folder, "--out", tmp_path / "out", "--shards", 2, "--prose").code == 0
    texts = [text for path in sorted((tmp_path / "out").iterdir()) for text in pq.read_table(path)["text"].to_pylist()]
    assert sorted(texts) == sorted(
        ["def stays(): as it is\n", *(f"{said}\n\nSee number {n} of them." for n in range(4))]
    )
