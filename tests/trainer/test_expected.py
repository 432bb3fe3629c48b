# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that sends arbitrary messages: nothing is written or allocated, and one sentence names the rank."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch

from nanochat.kit import expected
from nanochat.kit.common import Ranks, UserError
from nanochat.parallel import agreement, sync
from nanochat.parallel.comm import Comm, _beat, _farewell
from nanochat.rules.causes import Cause
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import restore, resume, saving
from nanochat.run.resume import ChosenStep

ENDLESS = "[" * 10**5


class Honest(Comm):
    """Rank 0; rank 1 sends it an arbitrary message in one exchange, and in all others the same message as its own."""

    def __init__(self, about: str, evil: Any) -> None:
        super().__init__(Ranks(0, 0, 2), 5.0)
        self.about, self.evil = about, evil if evil is ENDLESS else json.dumps(evil)
        self.asked = False

    def messages(self, what: str, mine: str, patient: bool) -> list[str | bytes]:
        self.asked = self.asked or what.startswith(self.about)
        return [mine, self.evil if what.startswith(self.about) else mine]

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        pytest.fail("nothing may be carried")


def fed(comm: Comm) -> Any:
    """A sync with error feedback."""
    return SimpleNamespace(comm=comm, feedback={"a": torch.zeros(1)})


def saves(comm: Comm) -> Any:
    """A run that saves."""
    return SimpleNamespace(comm=comm, sync=SimpleNamespace(whole_state=dict))


SHA = "0" * 64
WEIGHTS = {"a": torch.zeros(2)}
FILES: list[list[Any]] = [[name, 3, SHA] for name in checkpoints.files_of(5, 1)]


def in_place_of(number: int, name: str, size: Any = 3, sha256: Any = SHA) -> list[Any]:
    """The answer of a rank that holds a whole checkpoint, with one entry replaced."""
    return [1, [*FILES[:number], [name, size, sha256], *FILES[number + 1 :]]]


NAMES = [
    "./../../.bashrc", "../.bashrc", "/etc/passwd", "", ".", "model_000006.pt", "ckpt_000005_rank0.json", "model_000005.pt\n",
    "model_000005.pt/../x", "optim_000005_rank1.pt/../../x", "optim_000005_rank٣.pt", "optim_000005_rank1234567.pt", "model_000005xpt",
]  # fmt: skip
CROSSINGS: list[tuple[str, Callable[[Comm, Path], Any], list[Any]]] = [
    (
        "the comparison of settings",
        lambda comm, folder: agreement.agree(comm, {"a": 1}),
        [None, ["x"], [3, {}], ["x", {"a": 3}]],
    ),
    ("the first weights", lambda comm, folder: agreement.start_alike(comm, WEIGHTS), [None, {}, {"b": "x"}, {"a": 3}]),
    (
        "the comparison of weights",
        lambda comm, folder: agreement.check_identical(comm, WEIGHTS, "now"),
        [None, {}, {"b": "x"}, {"a": []}],
    ),
    ("the checkpoint folders", resume.folder_leader, [*NAMES, 3, None]),
    (
        "the trainings of all",
        lambda comm, folder: resume.find_training(comm, folder, ""),
        [None, ["", []], ["", {"": ["5"]}], ["", {"../x": [1]}], ["x", {}]],
    ),
    (
        "whether step",
        lambda comm, folder: resume.choose_step(comm, folder, 5, [[], []]),
        [None, [], [True], [1, 0], {"0": True}],
    ),
    (
        "who has step",
        lambda comm, folder: resume.fetch(comm, folder, ChosenStep(5, None), 0),
        [
            *(in_place_of(number, name) for number in range(4) for name in NAMES if name != FILES[number][0]),
            *([0, [*FILES[:2], [name, 3, SHA]]] for name in NAMES),
            *(in_place_of(0, FILES[0][0], *wrong) for wrong in [(-1,), (3, "x")]),
            *([1, []], [2, FILES], [1, FILES * 2], [None, FILES], [10**30, FILES], [1, FILES, 1]),
            *([0, [*FILES[:3], FILES[2]]], [1, [FILES[1], FILES[0]]], None, [None, []]),
        ],
    ),
    ("the matrix libraries", lambda comm, folder: saving.checkpoint(saves(comm)), [None, 3, ["mkl"], "x" * 10**5]),
    (
        "whose momentum",
        lambda comm, folder: restore.merge_momentum(comm, {"muon": {}}, {}, []),
        ["x", [3], {}, ["x" * 10**5]],
    ),
    (
        "the error feedback",
        lambda comm, folder: restore.restore_feedback(fed(comm), [1, 1], None, print),
        [None, 1, [True]],
    ),
    ("what was removed", lambda comm, folder: saving.make_room(comm, folder, 2, []), [None, "x", [-1], ["x"]]),
]


@pytest.mark.parametrize(("about", "cross", "words"), CROSSINGS, ids=[about for about, dummy, dummy2 in CROSSINGS])
def test_whatever_another_rank_says_is_refused_in_a_sentence_that_names_it(
    about: str, cross: Callable[[Comm, Path], Any], words: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "checkpoints"
    for word in [*words, ENDLESS]:
        comm = Honest(about, word)
        with pytest.raises(UserError) as caught:
            cross(comm, folder)
        assert comm.asked
        if about != "who has step" or word not in (None, [None, []]):
            assert str(caught.value).startswith(f"rank 1 sent an invalid message about {about}"), word
            assert (caught.value.cause, caught.value.blames) == (Cause.CODE_DIFFERS, [1])
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], word


def test_figures_and_lengths_have_bounds() -> None:
    for value in (-1, 2.0, 10**30, True, "5", None):
        assert not expected.count()(value)
    assert expected.count()(5) and expected.listed(expected.count())([5]) and expected.text("x")
    assert not expected.listed(expected.count())(list(range(200_000)))
    assert not expected.named(expected.text)({str(n): "" for n in range(200_000)})
    assert not expected.text("x" * 10**5)


def test_no_exchange_takes_just_anything() -> None:
    for path in sorted((ranks.TRAINER / "nanochat").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "exchange":
                assert "fits" in [keyword.arg for keyword in node.keywords], f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("ids", [[-1, 3], [3, 300], [2**31 - 1], [-(2**31)]])
def test_token_ids_without_a_row_are_refused(ids: list[int]) -> None:
    sync.check_ids(torch.tensor([0, 299], dtype=torch.int32), 300, 1)
    sync.check_ids(torch.empty(0, dtype=torch.int32), 300, 1)
    with pytest.raises(UserError, match=r"rank 1 has token ids between .*, but the tables have 300 rows") as caught:
        sync.check_ids(torch.tensor(ids, dtype=torch.int32), 300, 1)
    assert caught.value.blames == [1]


def test_last_words_and_beats_of_another_rank_are_read_whatever_they_are() -> None:
    assert _farewell(b'["it is full", "disk-full", [2]]') == ("it is full", Cause.DISK_FULL, [2])
    assert _beat(b'[3, "a", "data", 4, 5]') == [3, "a", "data", 4, 5]
    assert str(UserError("it\x1b[2J\nsays")) == "it [2J says"
    for word in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'["x", "no cause", []]',
        b'["x", "bug", ["2"]]',
        b'{"error": 1}',
        b"\xff",
        ENDLESS.encode(),
    ):
        assert _farewell(word).cause is Cause.BUG
        assert _beat(word)[1:] == ["never seen", "start", -1, 0]


class Mimics(Honest):
    """Rank 1; rank 0 repeats its message about the folders."""

    def __init__(self) -> None:
        super().__init__("nothing", None)
        self.rank = 1


def test_nobody_leads_a_folder_by_the_mark_of_another(tmp_path: Path) -> None:
    assert resume.folder_leader(Mimics(), tmp_path) == 1
