# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One short training of two local nodes, from empty folders to its end, by the ansible-core that runs this test."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.nanochat.ddp.tests.integration.two_nodes import events, two_nodes

STEPS = 3


def test_it_ends_with_identical_weights_and_without_a_word_of_ansibles(tmp_path: Path) -> None:
    with two_nodes(tmp_path, ddp_iterations=STEPS) as nodes:
        screen = nodes.play("nanochat.ddp.train")
        assert "WARNING" not in screen and "deprecat" not in screen.lower(), screen
        for name in ("one", "two"):
            (run,) = (tmp_path / name / "runs").iterdir()
            assert [event["step"] for event in events(run, "step")] == list(range(STEPS)), screen
            (end,) = events(run, "end")
            assert end["reason"] == "finished" and events(run, "digest")[-1]["identical"] is True
        (report,) = (tmp_path / "results").glob("*/report.html")
        assert report.stat().st_size > 10_000
        assert "finished" in nodes.play("nanochat.ddp.status")
