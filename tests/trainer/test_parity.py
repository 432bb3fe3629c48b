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

import pytest
from forked import always

from nanochat.model import kernels, numerics
from nanochat.model.fused import kernel_shape
from nanochat.rules.model_size import ModelConfig
from scripts import parity

PATH = Path(__file__).parent / "golden" / "model.json"
GOLDEN = json.loads(PATH.read_text())


def differences(wanted: Any, got: Any, place: str = "") -> list[str]:
    """Figures that differ by more than the tolerance: 1e-5 for losses, 1e-4 relative for others."""
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
        patch.setattr(numerics, "try_route", always("mkl"))
        yield


def replay(path: Path, folder: Path) -> dict[str, Any]:
    parity.main([str(path), "--write", str(folder / "out.json")])
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return result


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a file without the expected figures."""
    stripped, folder = copy.deepcopy(GOLDEN), tmp_path_factory.mktemp("parity")
    for case in stripped["cases"]:
        for key in ("param_counts", "flops_per_token", "keys", "logits", "eval_loss", "final_eval_loss"):
            del case[key]
        case["steps"] = [
            {key: step[key] for key in ("lr_multiplier", "muon_momentum", "muon_weight_decay")}
            for step in case["steps"]
        ]
    stripped["sizes"] = [{key: size[key] for key in parity.SIZE_KEYS} for size in stripped["sizes"]]
    (folder / "in.json").write_text(json.dumps(stripped))
    return replay(folder / "in.json", folder)


def test_golden_figures(replayed: dict[str, Any]) -> None:
    assert differences(GOLDEN, replayed) == []


@pytest.fixture
def all_kernels() -> Iterator[kernels.KernelChoice]:
    """All C kernels, including those that are slower on this machine."""
    shape = kernel_shape(ModelConfig(**GOLDEN["cases"][0]["config"]), 2, "fp32")
    found = kernels.setup("auto", shape)
    for kernel in kernels.ALL:
        kernel.on = kernel.right
    yield found
    kernels.setup("torch", shape)


def test_golden_figures_with_all_kernels(
    all_kernels: kernels.KernelChoice, replayed: dict[str, Any], tmp_path: Path
) -> None:
    assert all_kernels.why == "" and "differs" not in all_kernels.off.values()
    with_kernels = replay(PATH, tmp_path)
    assert differences(GOLDEN, with_kernels) == [] and with_kernels != replayed
