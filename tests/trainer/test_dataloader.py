# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches: identical to upstream's, resumed exactly, and never awaited forever."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq

from nanochat.data import dataloader, tokenizer
from nanochat.data.dataloader import Cursor, Loader
from nanochat.data.dataset import Shard
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import DataError, UserError
from nanochat.rules.causes import Cause
from nanochat.run.stage import Reader, RunStage
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


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (2, 3)])
def test_resuming_goes_on_with_the_very_same_tokens(tmp_path: Path, tokens: Tokenizer, rank: int, world: int) -> None:
    loader = Loader(tokens, SHARDS, "train", 2, 64, rank, world)
    draw(loader, 25)
    torch.save(loader.state(), tmp_path / "state.pt")
    wanted, ends_at = draw(loader, 60), loader.position()
    loader.close()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = Loader(
        tokens, SHARDS, "train", 2, 64, rank, world, position={"pq_idx": 0, "rg_idx": 0, "epoch": 9}, state=state
    )
    found = draw(resumed, 60)
    assert resumed.position() == ends_at
    resumed.close()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_resuming_in_the_middle_of_a_row_group(tmp_path: Path, tokens: Tokenizer) -> None:
    write_shards(tmp_path, [f"{i} " * (i % 17 + 1) for i in range(1700)], group=1700)
    loader = Loader(tokens, tmp_path, "train", 2, 64, 0, 1)
    draw(loader, 3)
    state = loader.state()
    assert 0 < state["cursor"][3] < 1700 / dataloader.DOCUMENTS_AT_ONCE
    wanted = draw(loader, 80)
    loader.close()
    resumed = Loader(tokens, tmp_path, "train", 2, 64, 0, 1, state=state)
    assert all(torch.equal(a, b) for a, b in zip(wanted, draw(resumed, 80), strict=True))
    resumed.close()


@given(
    st.lists(st.lists(st.integers(0, 400), min_size=4, max_size=9), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=4, max_size=4)), min_size=2, max_size=4
    ),
)
def test_ranks_that_change_read_no_document_twice_and_leave_none_out(
    rows: list[list[int]], phases: list[tuple[int, list[int]]]
) -> None:
    """A slice represents its documents: in the end each was read once per epoch, whichever rank read it."""
    shards = [Shard(Path(str(number)), (150, *groups)) for number, groups in enumerate(rows)]
    seen: dict[tuple[int, int, int, int], int] = {}
    states: list[dict[str, Any]] = []
    for world, counts in phases:
        ranks = []
        for rank in range(world):
            if not any(sum(shard.group_rows[rank::world]) for shard in shards):
                return
            state = dataloader.deal(states, shards, rank, world) if states else None
            ranks.append(read_slices(shards, rank, world, counts[rank], state, seen))
        states = ranks
    assert set(seen.values()) <= {1}
    # Nothing is missing in the epochs before the slowest rank's.
    left = dataloader.deal(states, shards, 0, 1)
    cursor = Cursor(*left["cursor"])
    oldest = min([cursor.epoch, *(one[0] for one in cursor.ahead)])
    for epoch in range(1, oldest):
        for file, shard in enumerate(shards):
            for group, documents in enumerate(shard.group_rows):
                for number in range(-(-documents // dataloader.DOCUMENTS_AT_ONCE)):
                    assert (epoch, file, group, number) in seen


def read_slices(
    shards: list[Shard], rank: int, world: int, count: int, state: dict[str, Any] | None, seen: dict[Any, int]
) -> dict[str, Any]:
    """Read this many slices as a rank would; returns its state, with no documents waiting."""

    class Reader(dataloader.DocumentReader):
        def _read(self, index: int, group: int) -> list[str]:
            return ["x"] * self.shards[index].group_rows[group]

    reader, cursor = Reader(shards, rank, world), Cursor(0, 0, 1, 0)
    at = Cursor(*state["cursor"]) if state else None
    for dummy, cursor in itertools.islice(reader.slices(at.position() if at else dataloader.START, at), count):
        one = (cursor.epoch, cursor.pq_idx, cursor.rg_idx, cursor.next_slice - 1)
        seen[one] = seen.get(one, 0) + 1
    return dataloader.state_of(rank, world, shards, cursor, [])


def test_what_waited_for_a_row_is_dealt_too_and_a_lost_rank_is_replayed(tokens: Tokenizer) -> None:
    states = []
    for rank in range(2):
        loader = Loader(tokens, SHARDS, "train", 2, 64, rank, 2)
        draw(loader, 5)
        states.append(loader.state())
        loader.close()
    begun = {"rank": 1, "world": 2}
    again = dataloader.replayed(tokens, SHARDS, begun, 10, 64)
    assert torch.equal(again["tokens"], states[1]["tokens"])
    assert again["cursor"] == states[1]["cursor"]
    shards = dataloader.dataset.inspect_split(SHARDS, "train", 1)
    alone = dataloader.deal(states, shards, 0, 1)
    assert sorted(alone["tokens"].tolist()) == sorted([*states[0]["tokens"].tolist(), *states[1]["tokens"].tolist()])


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


def own_reader(folder: Path, length: int, rank: int, world: int) -> Reader:
    settings: Any = SimpleNamespace(max_seq_len=length, timeout_seconds=60)
    return Reader(settings, tokenizer.load(GOLDEN / "data" / "tokenizer"), folder, rank, world, lambda: False)


@pytest.mark.parametrize(
    ("size", "length", "world"),
    [
        (200_000, 64, 1),
        (200_000, 2048, 3),
        (1_000_000, 512, 2),
        pytest.param(50_000_000, 1024, 2, marks=pytest.mark.long),
    ],
)
def test_an_own_text_is_read_whole_before_any_of_it_again(
    size: int, length: int, world: int, tmp_path: Path, tokens: Tokenizer
) -> None:
    folder, shares = own_text(tmp_path, size), [rank + 1 for rank in range(world)]
    texts = list(dataloader.dataset.texts(dataloader.dataset.split_paths(folder, "train")))
    whole = Counter(token for text in texts for token in tokens.encode(text))
    left, total, order = whole.copy(), sum(whole.values()), []
    streams = [RunStage().training_loader(own_reader(folder, length, r, world), shares) for r in range(world)]
    while min(left.values()) >= 0:
        rows = [
            (row, stream.position()["epoch"])
            for r, stream in enumerate(streams)
            for pair in stream.step([shares[r]])
            for row in pair[1]
        ]
        order += [tuple(row[:20].tolist()) for row, dummy in rows]
        seen, epochs = total - sum(left.values()), [epoch for dummy, epoch in rows]
        left.subtract(token for row, dummy in rows for token in row.tolist() if token != tokens.bos)
        assert set(epochs) <= ({1} if seen < total - 2 * length * sum(shares) - dataloader.MIXED_TOKENS else {1, 2})
    for stream in streams:
        stream.close()
    assert seen > 0.95 * total
    assert len(set(order)) == len(order)
    # Neighbours in the text are not neighbours in the rows.
    wanted, starts = set(order), {}
    for number, ids in enumerate(map(tokens.encode, texts)):
        starts.update({start: number for at in range(len(ids)) if (start := tuple(ids[at : at + 20])) in wanted})
    known = [starts[row] for row in order if row in starts]
    assert sum(a == b for a, b in itertools.pairwise(known)) < 0.4 * len(known)


def test_an_own_text_is_resumed_by_other_ranks_where_it_was_left(tmp_path: Path) -> None:
    folder, stage = own_text(tmp_path, 300_000), RunStage()

    def rows(ranks: int, states: Any, steps: int) -> tuple[list[Any], Any]:
        readers = [own_reader(folder, 64, rank, ranks) for rank in range(ranks)]
        shares = [6 // ranks] * ranks
        places = states and stage.exact_positions(readers[0], states)
        assert states is None or places is not None
        streams = [stage.training_loader(reader, shares, None, places) for reader in readers]
        found = [[stream.step([6 // ranks])[0][1].tolist() for stream in streams] for dummy in range(steps)]
        for stream in streams:
            stream.close()
        return [row for step in found for part in step for row in part], [stream.state() for stream in streams]

    # More than one reading of the text.
    whole, dummy = rows(1, None, 400)
    first, states = rows(3, None, 150)
    second, states = rows(2, states, 100)
    third, dummy = rows(1, states, 150)
    assert first + second + third == whole


def test_a_loader_that_is_closed_leaves_no_thread(tokens: Tokenizer) -> None:
    """Shares of a step change while a run goes on, each time with a new loader."""
    before = threading.active_count()
    loader = Loader(tokens, SHARDS, "train", 2, 64, 0, 1)
    draw(loader, 1)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


def test_field_07_a_rank_without_row_groups_is_refused(tmp_path: Path, tokens: Tokenizer) -> None:
    write_shards(tmp_path, ["some text"] * 20)
    with pytest.raises(UserError, match=r"rank 2 of 3 would get no train documents: .* at most 2 row group"):
        Loader(tokens, tmp_path, "train", 1, 8, 0, 3)


def test_a_bad_validation_shard_is_refused_before_training(tmp_path: Path, tokens: Tokenizer) -> None:
    write_shard(tmp_path / "a.parquet", ["some text"] * 40, group=10)
    write_shard(tmp_path / "b.parquet", ["some text"] * 20, group=20)
    # All ranks read all of it, so one row group is enough.
    Loader(tokens, tmp_path, "train", 1, 8, 0, 2).close()
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"b\.parquet is not a complete parquet file"):
        Loader(tokens, tmp_path, "train", 1, 8, 0, 1)


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
    yield pytest.param(
        lambda d: (d / "b.parquet").write_bytes(b""), "b.parquet is not a complete parquet file", id="empty"
    )
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


def test_a_reader_that_is_gone_without_a_word_is_noticed(tmp_path: Path) -> None:
    loader = odd_loader(tmp_path, lambda: None)
    loader.packer.batch = sys.exit  # type: ignore[method-assign]
    loader._put = lambda made: None  # type: ignore[method-assign]
    with pytest.raises(DataError, match="the data reader thread died"):
        for dummy in range(10):
            loader.next_batch()


def test_a_disk_that_gives_nothing_is_not_waited_for_without_end(tmp_path: Path) -> None:
    release = threading.Event()
    loader = odd_loader(tmp_path, release.wait, patience=0.6)
    with pytest.raises(DataError, match=r"no data arrived for \d+ s; the last read was row group 0 of .*a\.parquet"):
        loader.next_batch()
    release.set()
    loader.close()


def test_whoever_waits_for_data_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "STOP_SECONDS", 0.5)
    release = threading.Event()
    loader = odd_loader(tmp_path, release.wait, interrupted=lambda: True)
    with pytest.raises(UserError, match="stopped while waiting for data") as caught:
        loader.next_batch()
    assert caught.value.cause is Cause.STOPPED
    release.set()
    loader.close()
