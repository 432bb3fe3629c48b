# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The golden figures of upstream, replayed through the training path."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
from routes import always

from nanochat.model import numerics

GOLDEN = json.loads((Path(__file__).parent / "golden" / "model.json").read_text())


def differences(wanted: Any, got: Any, place: str = "") -> list[str]:
    """Where two figures differ by more than golden figures may: losses 1e-5, all else 1e-4 relative."""
    if isinstance(wanted, dict):
        assert set(wanted) == set(got), place
        return [line for key in wanted for line in differences(wanted[key], got[key], f"{place}/{key}")]
    if isinstance(wanted, list):
        assert len(wanted) == len(got), place
        pairs = enumerate(zip(wanted, got, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{place}/{number}")]
    if isinstance(wanted, float):
        limit = 1e-5 if "loss" in place.rsplit("/", 1)[1] else 1e-4 * abs(wanted)
        return [] if abs(got - wanted) <= limit else [f"{place}: {got}, not {wanted}"]
    return [] if got == wanted else [f"{place}: {got}, not {wanted}"]


@pytest.fixture(scope="module", autouse=True)
def one_library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "choose", always("mkl"))
        yield


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    # As it would be written down.
    result: dict[str, Any] = json.loads(json.dumps(parity.replayed(GOLDEN)))
    return result


def test_golden_figures(replayed: dict[str, Any]) -> None:
    assert differences(GOLDEN, replayed) == []


def test_expected_figures_are_never_read(replayed: dict[str, Any]) -> None:
    stripped = copy.deepcopy(GOLDEN)
    for case in stripped["cases"]:
        for key in ("param_counts", "flops_per_token", "keys", "logits", "eval_loss", "final_eval_loss"):
            del case[key]
        case["steps"] = [
            {key: step[key] for key in ("lr_multiplier", "muon_momentum", "muon_weight_decay")}
            for step in case["steps"]
        ]
    stripped["sizes"] = [{key: size[key] for key in parity.SIZE_KEYS} for size in stripped["sizes"]]
    assert json.loads(json.dumps(parity.replayed(stripped))) == replayed
