# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which training continues, and which steps are of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanochat.kit.common import BadCheckpoint, UserError
from nanochat.rules.causes import Cause
from nanochat.run.lineage import BASE_TRAINING, TRAINING, choose, fits_wanted_and_held, id_of, steps_of, wanted

A, B = "a" * 16, "b" * 16


def test_the_training_of_all_checkpoints_is_resumed() -> None:
    assert choose(["", ""], [{A: [6]}, {A: [6, 12], "": [3]}]) == A
    assert choose(["", ""], [{"": [6]}, {}]) == ""


def test_the_named_training_is_resumed_by_all_ranks() -> None:
    assert choose([B, ""], [{A: [12]}, {B: [6]}]) == B
    assert choose([B], [{"": [3]}]) == B


def test_two_trainings_are_refused() -> None:
    with pytest.raises(
        BadCheckpoint, match=rf"to 2 trainings: {A} \(to step 12, on rank 0, 2\) and {B}.*set NANOCHAT_TRAINING"
    ):
        choose(["", "", ""], [{A: [6]}, {B: [8]}, {A: [12]}])
    with pytest.raises(UserError, match=f"{A} on rank 0, {B} on rank 1") as caught:
        choose([A, B], [{}, {}])
    assert caught.value.cause is Cause.SETTINGS_DIFFER


def test_an_unknown_training_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match=rf"names {B}, but the checkpoints belong to {A} \(to step 6"):
        choose([B], [{A: [6]}])


def test_steps_of_another_training_do_not_count() -> None:
    held = [{A: [12], "": [14]}, {B: [6]}, {"": [6, 9]}]
    assert steps_of(A, held[0], held) == [12, 14]
    assert steps_of(B, held[0], held) == steps_of(B, held[2], held) == []
    assert steps_of(B, held[2], held, parts=[6]) == [6]
    assert steps_of("", held[2], [held[2]]) == steps_of(B, held[2], [held[2]]) == [6, 9]


def test_the_training_comes_from_environment_or_run_folder(tmp_path: Path) -> None:
    assert wanted(tmp_path, environ={}) == ""
    (tmp_path / "training.json").write_text(json.dumps({"id": A, "base": B}))
    assert (wanted(tmp_path, environ={}), wanted(tmp_path, BASE_TRAINING, {})) == (A, B)
    assert wanted(tmp_path, environ={TRAINING: B}) == B
    with pytest.raises(UserError, match="NANOCHAT_TRAINING is 'newest', which is not a training id"):
        wanted(tmp_path, environ={TRAINING: "newest"})
    for torn in ("{", "[]", '{"id": 5}', '{"id": "../x"}'):
        (tmp_path / "training.json").write_text(torn)
        assert wanted(tmp_path, environ={}) == ""


def test_only_ids_and_steps_are_taken_from_another_rank() -> None:
    assert fits_wanted_and_held([A, {A: [1], "": []}])
    for told in ([A, {"../x": [1]}], ["x", {}], [A, {A: [-1]}], [A, {A: 1}], A, [A]):
        assert not fits_wanted_and_held(told)
    assert (id_of({"training": A}), id_of({"training": "x"}), id_of({})) == (A, "", "")
