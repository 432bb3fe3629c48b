# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prediction that bench/two_nodes.py prints beside each measurement."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import two_nodes

SPEED = {"pass_seconds": 0.2, "adamw_seconds": 0.02, "muon_seconds": 0.05}


def test_each_way_has_a_prediction_and_one_is_that_of_auto():
    rows = [{"sync": sync} for sync in ("alone", "exact+head", "int8+head", "int4+head")]
    two_nodes.add_expected(rows, two_nodes.MODELS["d4"], "100mbit", 0.0, [SPEED, SPEED])
    expected = {row["sync"]: row.get("expected") for row in rows}
    assert expected.pop("alone") is None
    assert expected["exact+head"] > expected["int8+head"] > expected["int4+head"]
    assert [row["sync"] for row in rows if row.get("auto")] == ["int4+head"]


def test_hosts_eight_times_as_fast_are_a_link_eight_times_as_slow_in_an_eighth_of_the_time(monkeypatch):
    shaped = []
    monkeypatch.setattr(two_nodes, "command", lambda *argv: shaped.append(" ".join(argv[8:])))
    two_nodes.shape(["a"], "100mbit", 8)
    assert shaped == ["tbf rate 12.5mbit burst 68kb latency 400ms"]
    assert two_nodes.label_of("100mbit", 2.0, 8, 4) == "100mbit, 2 ms, hosts 8 times as fast, 4 passes"
    told = [{**SPEED, "tokens_per_second": 3}, {"exact": [{"seconds": 4.0, "cpu": 2.0, "waited": 1.0, "bytes": 7}]}]
    speed, steps = two_nodes.sped_up(told, 8)
    assert (speed["pass_seconds"], speed["tokens_per_second"]) == (0.2 / 8, 3)
    assert steps == {"exact": [{"seconds": 0.5, "cpu": 0.25, "waited": 0.125, "bytes": 7}]}
