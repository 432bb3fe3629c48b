# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches: identical to upstream's, resumed exactly, and never awaited forever."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ranks
import tiktoken
import torch
from pyarrow import parquet as pq
from trainings import Job

from nanochat.data import dataloader
from nanochat.data.dataloader import Loader
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError, UserError
from nanochat.rules.causes import Cause
from scripts import make_shards
from scripts.parity_loader import replay

GOLDEN = Path(__file__).parent / "golden"
SHARDS = GOLDEN / "data/base_data_climbmix"


def write_shard(path: Path, texts: Sequence[str | None], group: int = 10) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)


def write_shards(folder: Path, texts: Sequence[str | None], group: int = 10) -> None:
    """The same texts for training and validation."""
    for name in ("a", "b"):
        write_shard(folder / f"{name}.parquet", texts, group)


def draw(loader: Loader, batches: int) -> list[torch.Tensor]:
    return [torch.stack(loader.next_batch()) for dummy in range(batches)]


def test_batches_and_positions_are_upstreams() -> None:
    cases = json.loads((GOLDEN / "loader.json").read_text())
    blank = json.loads(
        json.dumps(cases), object_hook=lambda d: {**d, "x": "", "y": "", "state": None} if "x" in d else d
    )
    assert replay(blank, GOLDEN / "data") == cases


def naive_take(lengths: list[int], room: int) -> int:
    """The rule, naively."""
    fitting = [n for n in lengths if n <= room]
    return lengths.index(max(fitting)) if fitting else lengths.index(min(lengths))


def plain_batches(
    tokens: Tokenizer, groups: list[list[list[str]]], rows: int, length: int, rank: int, world: int
) -> Iterator[tuple[list[list[int]], dict[str, int]]]:
    """The data rules, naively; groups[file][group] are documents."""

    def documents() -> Iterator[tuple[list[str], dict[str, int]]]:
        epoch = 1
        while True:
            for file, held in enumerate(groups):
                for group in range(rank, len(held), world):
                    for begin in range(0, len(held[group]), 128):
                        where = {"pq_idx": file, "rg_idx": group, "epoch": epoch}
                        yield held[group][begin : begin + 128], where
            epoch += 1

    source, buffer = documents(), []
    while True:
        batch = []
        for dummy in range(rows):
            row: list[int] = []
            while len(row) < length + 1:
                while len(buffer) < 1000:
                    texts, where = next(source)  # pylint: disable=stop-iteration-return  # it never ends
                    buffer += [[tokens.bos, *tokens.encode(text)] for text in texts]
                at = naive_take([len(document) for document in buffer], length + 1 - len(row))
                row += buffer.pop(at)[: length + 1 - len(row)]
            batch.append(row)
        yield batch, where


@pytest.mark.parametrize(("rank", "world", "rows", "length"), [(0, 1, 3, 40), (1, 2, 1, 200), (2, 3, 2, 17)])
def test_batches_follow_the_words_on_other_data(
    tmp_path: Path, tokens: Tokenizer, rank: int, world: int, rows: int, length: int
) -> None:
    """Row groups larger than a slice, files of different sizes, empty documents, several epochs."""
    rng = random.Random(length)
    files = [
        [" ".join(["ab", "c", "defg"][: rng.randint(0, 3)] * rng.randint(0, 9)) for dummy in range(n)]
        for n in (900, 610, 500)
    ]
    for number, texts in enumerate(files):
        write_shard(tmp_path / f"{number}.parquet", texts, group=150)
    groups = [[texts[i : i + 150] for i in range(0, len(texts), 150)] for texts in files]
    for split, part in (("train", groups[:2]), ("val", groups[2:])):
        loader = Loader(tokens, tmp_path, split, rows, length, rank, world)
        plain = plain_batches(tokens, part, rows, length, rank, world)
        for dummy in range(100):
            (inputs, targets), (wanted, where) = loader.next_batch(), next(plain)
            assert inputs.tolist() == [row[:-1] for row in wanted]
            assert targets.tolist() == [row[1:] for row in wanted]
            assert loader.position() == where
        loader.close()


def own_text(folder: Path, size: int) -> Path:
    """Shards of a text of this many characters: one long file and many short ones."""
    rng, words = random.Random(size), [f"{number:x}" for number in range(3000)]
    (folder / "text").mkdir()
    text = " ".join(rng.choices(words, k=size // 4))[:size]
    (folder / "text" / "long.txt").write_text(text[: size // 2])
    for begin in range(size // 2, size, 3000):
        (folder / "text" / f"{begin}.txt").write_text(text[begin : begin + 3000])
    make_shards.main(["--from", str(folder / "text"), "--out", str(folder / "shards"), "--shards", "8"])
    return folder / "shards"


@pytest.mark.parametrize(
    ("size", "length", "rows"),
    [
        (200_000, 64, 1),
        (200_000, 2048, 6),
        (1_000_000, 512, 3),
        pytest.param(50_000_000, 1024, 3, marks=pytest.mark.long),
    ],
)
def test_an_own_text_is_read_whole_before_any_of_it_again(
    size: int, length: int, rows: int, tmp_path: Path, tokens: Tokenizer
) -> None:
    folder = own_text(tmp_path, size)
    texts = list(dataloader.dataset.texts(dataloader.dataset.split_paths(folder, "train")))
    whole = Counter(token for text in texts for token in tokens.encode(text))
    left, total, order = whole.copy(), sum(whole.values()), []
    loader = Loader(tokens, folder, "train", rows, length)
    while min(left.values()) >= 0:
        drawn = loader.next_batch()[1].tolist()
        order += [tuple(row[:20]) for row in drawn]
        seen = total - sum(left.values())
        left.subtract(token for row in drawn for token in row if token != tokens.bos)
        early = seen < total - 2 * length * rows - dataloader.MIXED_TOKENS
        assert loader.position()["epoch"] in ({1} if early else {1, 2})
    loader.close()
    assert seen > 0.95 * total
    assert len(set(order)) == len(order)
    # Neighbours in the text are not neighbours in the rows.
    wanted, starts = set(order), {}
    for number, ids in enumerate(map(tokens.encode, texts)):
        starts.update({start: number for at in range(len(ids)) if (start := tuple(ids[at : at + 20])) in wanted})
    known = [starts[row] for row in order if row in starts]
    assert sum(a == b for a, b in itertools.pairwise(known)) < 0.4 * len(known)


def one_group(folder: Path, size: int) -> Path:
    """Shards of one row group each, of about this many characters."""
    write_shards(folder, [f"{i} " * (i % 17 + 1) for i in range(size // 40)], group=size)
    return folder


@pytest.mark.parametrize("make", [own_text, one_group])
def test_a_loader_is_resumed_where_it_was_left(
    make: Callable[[Path, int], Path], tmp_path: Path, tokens: Tokenizer
) -> None:
    """In the middle of a row group, too, and in more than one reading; the position counts only where there is no state."""
    folder, saved = make(tmp_path, 150_000), tmp_path / "state.pt"
    loader = Loader(tokens, folder, "train", 6, 64)
    whole, ends_at = draw(loader, 400), loader.position()
    loader.close()
    found, state = [], None
    for batches in (150, 100, 150):
        place = {"pq_idx": 0, "rg_idx": 0, "epoch": 9} if state else None
        loader = Loader(tokens, folder, "train", 6, 64, position=place, state=state)
        found += draw(loader, batches)
        torch.save(loader.state(), saved)
        state = torch.load(saved, weights_only=True)
        assert make is own_text or 0 < state["cursor"][3] < 150_000 / 40 / dataloader.DOCUMENTS_AT_ONCE
        loader.close()
    assert loader.position() == ends_at and ends_at["epoch"] > 1
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"digests": ["x", "y"]}, "the data have changed since (shard_00000.parquet, shard_00001.parquet)"),
        ({"rank": 0, "world": 1}, ""),
        ({"world": 2}, "in the version that made it each rank read documents of its own"),
        ({"cursor": [0, 0, 1, 0, [], None]}, "in the version that made it each rank read documents of its own"),
    ],
)
def test_a_state_says_why_it_cannot_be_continued_exactly(change: dict[str, Any], why: str) -> None:
    shards = dataloader.dataset.inspect_split(SHARDS, "train")
    files, digests = [shard.path.name for shard in shards], [shard.digest for shard in shards]
    state = {"files": files, "digests": digests, "cursor": [0, 0, 1, 0], **change}
    found = dataloader.why_not_exact(state, shards)
    assert found.startswith(why) and bool(found) == bool(why)
    # Earlier versions wrote no digests.
    if "digests" not in change:
        del state["digests"]
        assert dataloader.why_not_exact(state, shards) == found


def test_a_loader_that_is_closed_leaves_no_thread(tokens: Tokenizer) -> None:
    """Shares of a step change while a run goes on, each time with a new loader."""
    before = threading.active_count()
    loader = Loader(tokens, SHARDS, "train", 2, 64, 0, 1)
    draw(loader, 1)
    assert threading.active_count() > before
    begun = time.monotonic()
    loader.close()
    assert time.monotonic() - begun < dataloader.STOP_SECONDS / 2
    assert threading.active_count() == before


def test_a_reader_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    write_shards(tmp_path, ["text"] * 20)
    code = (
        "import sys, threading; from pathlib import Path; from test_dataloader import Odd, Loader; "
        "Loader(Odd(threading.Event().wait), Path(sys.argv[1]), 'train', 1, 8)"
    )
    environment = ranks.environment(0, 1, 0, {})
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=300)


def test_field_07_one_row_group_is_enough_for_any_number_of_ranks(tmp_path: Path) -> None:
    """And the losses are those of one rank: all read the same rows."""
    (tmp_path / "tokenizer").symlink_to(GOLDEN / "data" / "tokenizer")
    (tmp_path / "base_data_climbmix").mkdir()
    write_shards(tmp_path / "base_data_climbmix", [f"text {n} of some" for n in range(1500)], group=1500)
    losses = []
    for world in (1, 3):
        job = Job(tmp_path / str(world), world, tmp_path)
        job.run("--num-iterations", "4")
        losses.append(job.losses())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and len(losses[0]) == 4


def corrupt_middle(folder: Path) -> None:
    path = folder / "b.parquet"
    data = bytearray(path.read_bytes())
    data[10:200] = bytes(190)
    path.write_bytes(data)


def cases() -> Iterator[Any]:
    def torn(folder: Path) -> None:
        (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-20])

    def text_for_numbers(folder: Path) -> None:
        pq.write_table(pa.table({"text": [1, 2]}), folder / "b.parquet")

    def other_column(folder: Path) -> None:
        pq.write_table(pa.table({"content": ["a"]}), folder / "b.parquet")

    yield pytest.param(torn, "b.parquet is not a complete parquet file", id="torn")
    for name, data in (("b", b""), ("c", b"PAR1")):
        words = f"{name}.parquet is not a complete parquet file"
        yield pytest.param(lambda d, n=name, data=data: (d / f"{n}.parquet").write_bytes(data), words, id=f"no {name}")
    yield pytest.param(text_for_numbers, "b.parquet contains int64, not strings", id="numbers")
    yield pytest.param(other_column, "b.parquet has no column text, only content", id="column")
    yield pytest.param(lambda d: write_shard(d / "b.parquet", []), "b.parquet has no documents", id="no-documents")
    yield pytest.param(lambda d: write_shard(d / "b.parquet", ["a", None] * 9), "without text", id="null")
    yield pytest.param(corrupt_middle, "row group 0 of .*b.parquet cannot be read", id="damaged")
    yield pytest.param(lambda d: [(d / f"{n}.parquet").unlink() for n in "abc"], "no parquet files in", id="none")
    yield pytest.param(lambda d: [(d / f"{n}.parquet").unlink() for n in "ab"], "holds only c.parquet", id="only-one")
    yield pytest.param(shutil.rmtree, "cannot read the data folder", id="no-folder")


@pytest.mark.parametrize(("spoil", "words"), list(cases()))
def test_bad_data_is_refused_naming_the_file(tmp_path: Path, tokens: Tokenizer, spoil: Any, words: str) -> None:
    """Also in the last shard, which is for validation."""
    for name in ("a", "b", "c"):
        write_shard(tmp_path / f"{name}.parquet", [f"{name} {i} lorem ipsum" for i in range(50)])
    spoil(tmp_path)
    with pytest.raises(UserError, match=words):
        Loader(tokens, tmp_path, "train", 1, 64, 0, 1).next_batch()


def test_a_place_that_the_data_does_not_have_is_refused(tokens: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"does not exist in .* which has 2 file"):
        Loader(tokens, SHARDS, "train", 1, 64, 0, 1, position={"pq_idx": 2, "rg_idx": 0, "epoch": 1})


class Panic(BaseException):
    """A Rust panic as Python sees it."""


class Odd:
    """A tokenizer that misbehaves."""

    bos = 0

    def __init__(self, does: Any) -> None:
        self.does = does

    def encode_documents(self, texts: list[str], threads: int) -> list[list[int]]:
        self.does()
        return [[0, 1, 2, 3] for dummy in texts]


def odd_loader(folder: Path, does: Any, **options: Any) -> Loader:
    write_shards(folder, [f"text {n}" for n in range(20)])
    return Loader(Odd(does), folder, "train", 1, 8, 0, 1, **options)  # type: ignore[arg-type]


def test_field_32_a_tokenizer_that_panics_is_told_with_file_and_row_group(
    tmp_path: Path, tokens: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(encoding: object, texts: list[str], num_threads: int) -> None:
        raise Panic("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary_batch", panic)
    write_shards(tmp_path, [f"text {n}" for n in range(20)])
    loader = Loader(tokens, tmp_path, "train", 1, 8, 0, 1)
    for dummy in range(2):
        with pytest.raises(DataError, match=r"row group 0 of .*a\.parquet: a text cannot be tokenized \(Panic"):
            loader.next_batch()
    loader.close()


def test_field_32_a_million_blanks_end_with_a_sentence(tmp_path: Path, tokens: Tokenizer) -> None:
    write_shards(tmp_path, ["x" + " " * 1_100_000 + "y"])
    loader = Loader(tokens, tmp_path, "train", 1, 8, 0, 1)
    with pytest.raises(DataError, match=r"row group 0 of .*a\.parquet"):
        loader.next_batch()
    loader.close()


@pytest.mark.parametrize(
    ("waiting", "cause", "words"),
    [
        (
            {"patience": 0.6},
            Cause.BAD_DATA,
            r"no data arrived for \d+ s; the last read was row group 0 of .*a\.parquet",
        ),
        ({"interrupted": lambda: True}, Cause.STOPPED, "stopped while waiting for data"),
    ],
)
def test_a_disk_that_gives_nothing_is_not_waited_for_without_end(
    waiting: dict[str, Any], cause: Cause, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataloader, "STOP_SECONDS", 0.5)
    release = threading.Event()
    loader = odd_loader(tmp_path, release.wait, **waiting)
    with pytest.raises(UserError, match=words) as caught:
        loader.next_batch()
    assert caught.value.cause is cause
    release.set()
    loader.close()
