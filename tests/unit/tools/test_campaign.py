# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The campaign of random faults parses a playbook's output and writes its page."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "campaign"))

from campaign import NOT_PLAYED, drawn, play_all
from plays import advised, messages
from table import KEPT, Round, add, rows_in

SAID = """\
probe
  error disk-full  laptop: no space is left in /mnt/nanochat
    do: Free space on that host; then restart.
FAILED watch       12 s
doctor
  rank-killed: Rank 1 (laptop) was killed by SIGKILL.
    why: The kernel says nothing of memory.
    do:  Find out who did, then restart.
    rank 0 (desktop): ended with code 2
      stack: a.py:1 in f: g()
ok doctor         17 s
"""


def test_messages_are_read_with_what_belongs_to_them() -> None:
    """Each message is one line with its advice, without the doctor's evidence."""
    assert messages(SAID) == [
        "error disk-full laptop: no space is left in /mnt/nanochat do: Free space on that host; then restart.",
        "rank-killed: Rank 1 (laptop) was killed by SIGKILL. why: The kernel says nothing of memory. do: Find out who did, then restart.",
    ]


def test_a_healthy_run_is_no_message() -> None:
    """The doctor is called for slow runs, too."""
    assert (
        messages("doctor\n  healthy-slow: All ranks make progress.\n    do:  Take the load off.\nok doctor  1 s\n")
        == []
    )


def test_what_is_advised_is_played_before_the_training() -> None:
    """The playbooks that a message names, in order, and the training if none of them starts it."""
    restart = ["train", "--tags", "restart"]
    assert advised("") == [["train"]]
    assert advised("FAILED a: b\n  do: ansible-playbook train.yml -i INVENTORY --tags restart") == [restart]
    assert advised("FAILED a: b\n  do: ansible-playbook nanochat.ddp.stop -i INVENTORY") == [["stop"], ["train"]]
    assert advised("ok a\n  see: ansible-playbook nanochat.ddp.stop -i INVENTORY") == [["train"]]


def test_rounds_are_added_to_those_that_the_page_has(tmp_path: Path) -> None:
    """The text around the table stays, and the summary counts all rounds."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nWords.\n", encoding="utf-8")
    add(page, [Round(1, 1, "train, half", "3 s", "kill -9 | of a rank", "0 s", "", "train", KEPT)])
    page.write_text(page.read_text(encoding="utf-8") + "\nBelow.\n", encoding="utf-8")
    add(page, [Round(2, 1, "stop, half", "3 s", "nothing", "0 s", "a\nb", "train", "FAILED: x")])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Page\n\nWords.\n") and text.endswith("\nBelow.\n")
    assert "2 rounds of 2 seeds: 1 ended with" in text and "1 otherwise" in text
    assert [row.split(" | ")[4] for row in rows_in(text)] == ["kill -9 / of a rank", "nothing"]


def test_everything_is_drawn_once_before_anything_twice() -> None:
    """A seed draws the same again, and another one otherwise."""
    items = list(range(14))
    draws = [drawn(items, "1/fault", number) for number in range(1, 29)]
    assert sorted(draws[:14]) == sorted(draws[14:]) == items
    assert draws[:14] != draws[14:]
    assert draws == [drawn(items, "1/fault", number) for number in range(1, 29)]
    assert draws != [drawn(items, "2/fault", number) for number in range(1, 29)]


def asked(rounds: int, second_try: bool = False, report: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(only=None, rounds=rounds, second_try=second_try, report=report)


def test_a_round_that_failed_is_played_once_more_where_that_is_asked_for(tmp_path: Path) -> None:
    """The second result counts; the page keeps both."""

    def play(number: int) -> Round:
        calls.append(number)
        bad = {1: f"{NOT_PLAYED}: no answer", 2: "FAILED: x"}
        return Round(1, number, "", "", "", "", "", "", bad.get(number, KEPT) if calls.count(number) == 1 else KEPT)

    page = tmp_path / "page.md"
    for second_try, outcomes in ((True, [KEPT] * 3), (False, [f"{NOT_PLAYED}: no answer", "FAILED: x", KEPT])):
        calls: list[int] = []
        rounds: list[Round] = []
        play_all(play, asked(3, second_try, page), rounds, time.monotonic() + 60)
        assert [one.outcome for one in rounds] == outcomes
        assert calls == ([1, 1, 2, 2, 3] if second_try else [1, 2, 3])
    assert len(rows_in(page.read_text(encoding="utf-8"))) == 8


def test_no_further_round_is_begun_after_the_end() -> None:
    """However late it is, one is played."""
    rounds: list[Round] = []
    play_all(lambda number: Round(1, number, "", "", "", "", "", "", KEPT), asked(10), rounds, time.monotonic() - 1)
    assert [one.number for one in rounds] == [1]
