# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a run with a budget, in words and in bits per byte."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run import ending

LIKE = {"run": "old", "evals": [[0.25, 2.0], [0.75, 1.6], [1.0, 1.2]]}
END = time.mktime((2026, 11, 25, 7, 30, 0, 0, 0, -1))


def told(share: float | None = 0.5, bits: float | None = 0.9) -> dict[str, Any]:
    return {"val_share": share, "val_bpb": bits}


def test_rest_lowers_the_last_evaluation_as_in_the_similar_run():
    # Half-way the other had 1.8.
    assert ending.expected({"like": LIKE}, told()) == {"val_bpb": pytest.approx(0.9 * 1.2 / 1.8), "like": "old"}
    assert ending.expected({"like": LIKE}, told(0.75, 1.6)) == {"val_bpb": pytest.approx(1.2), "like": "old"}


@pytest.mark.parametrize(
    ("training", "run"),
    [
        ({}, told()),
        (None, told()),
        ({"like": {"run": "old", "evals": "x"}}, told()),
        ({"like": LIKE}, told(0.1)),
        ({"like": LIKE}, told(None)),
        ({"like": LIKE}, told(bits=None)),
    ],
)
def test_nothing_is_expected_without_a_similar_run_or_an_evaluation_within_its(training: Any, run: dict[str, Any]):
    assert ending.expected(training, run) is None


def test_end_in_words():
    def clock(at: float) -> str:
        return time.strftime("%H:%M", time.localtime(at))

    assert ending.ends_text(END, 0.612, clock) == "ends at 07:30, 61 % done"
    assert ending.ends_text(END, None, clock) == "ends at 07:30"
    early = ending.ended_text(END - 120, END, "07:30", clock)
    assert early == "ended at 07:28, 2 min 00 s early, of a budget until 07:30"
    assert ending.ended_text(END + 3, END, "8h", clock) == "ended at 07:30, 3.0 s late, of a budget of 8h"
    one: ending.Expected = {"val_bpb": 0.91234, "like": "old"}
    assert ending.expected_text(one) == "expected at the end: about 0.912 bits per byte, if it goes on like old"
