# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that freezes in any phase, also the one that serves the store, is named by the other, which ends by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

PHASES = ("rendezvous", "agree", "resume", "data", "step", "sync", "eval", "sample", "save", "end")
# Each phase with one rank frozen, alternately 0 and 1; the other rank's case is marked `long`.
CASES = [
    pytest.param(f"{phase}:{rank}", marks=[] if number % 2 == rank else pytest.mark.long)
    for number, phase in enumerate(PHASES)
    for rank in (0, 1)
]


def freeze(folder: Path, *cases: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ranks.HERE / "freeze_ranks.py"), str(folder), *cases],
        env=ranks.environment(0, 1, 0, {}), capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {one["case"]: one for one in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all selected cases, run by one process because they mostly wait."""
    items = [one for one in request.session.items if isinstance(one, pytest.Function) and one.path == request.path]
    return freeze(tmp_path_factory.mktemp("frozen"), *(str(one.callspec.params["case"]) for one in items))


@pytest.mark.parametrize("case", CASES)
def test_field_19_a_rank_frozen_in_any_phase_blocks_no_other(case: str, told: dict[str, Any], tmp_path: Path) -> None:
    # A repeated attempt freezes ranks again.
    one, frozen = told.pop(case, None) or freeze(tmp_path, case)[case], int(case[-1])
    assert one["froze"], one
    assert one["code"] == 2, one
    errors = [line for line in one["output"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, one
    assert "Traceback" not in one["output"]
    assert one["end"]["reason"] == "error"
    assert one["end"]["cause"] == ("peer-lost" if frozen else "store-lost"), one
    assert one["end"]["blames"] == [frozen], one
