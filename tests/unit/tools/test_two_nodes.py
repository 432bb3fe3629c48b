# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prediction that bench/two_nodes.py prints beside each measurement."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
SPEC = importlib.util.spec_from_file_location("two_nodes", BENCH / "two_nodes.py")
assert SPEC and SPEC.loader
two_nodes = importlib.util.module_from_spec(SPEC)
sys.modules["two_nodes"] = two_nodes
SPEC.loader.exec_module(two_nodes)

SPEED = {"pass_seconds": 0.2, "adamw_seconds": 0.02, "muon_seconds": 0.05}


def test_each_way_has_a_prediction_and_one_is_that_of_auto():
    rows = [{"sync": sync} for sync in ("alone", "ddp", "exact+head", "int8+head", "int4+head", "int8/30/15")]
    two_nodes.add_expected(rows, two_nodes.MODELS["d4"], "100mbit", 0.0, [SPEED, SPEED])
    expected = {row["sync"]: row.get("expected") for row in rows}
    assert expected.pop("alone") is None
    assert expected["ddp"] > expected["exact+head"] > expected["int8+head"] > expected["int4+head"]
    assert expected["int8/30/15"] > 0
    assert [row["sync"] for row in rows if row.get("auto")] == ["int4+head"]
