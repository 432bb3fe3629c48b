# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A nursery and the ranks that it forks, as their keeper sees them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import nursery
from ansible_collections.nanochat.ddp.tests.integration.local import until

PATIENCE = 60
ROOT = Path(__file__).resolve().parents[5]
RANK = """
import os, sys, time
open(os.environ["SEEN"], "w").write(" ".join(sys.argv[1:]))
while "wait" in sys.argv: time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nursery.Nursery]:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/nursery.py").symlink_to(ROOT / "trainer/scripts/nursery.py")
    (tmp_path / "scripts/rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = nursery.Nursery(sys.executable, ["no.such.module"])
    yield one
    one._process.kill()
    one._process.wait()


def started(home: nursery.Nursery, seen: Path, *words: str) -> None:
    assert home.start(["-m", "scripts.rank", *words], {"SEEN": str(seen)})
    until(lambda: seen.exists() and seen.read_text() == " ".join(words), PATIENCE)


def rank_of(home: nursery.Nursery) -> int:
    pid = home._process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def ended(home: nursery.Nursery) -> int | None:
    until(lambda: home.poll() is not None, PATIENCE)
    return home.poll()


def test_one_rank_after_the_other_and_how_each_ended(home: nursery.Nursery, tmp_path: Path) -> None:
    started(home, tmp_path / "first", "a")
    assert ended(home) == 3 == home.wait()
    started(home, tmp_path / "second", "wait")
    assert home.poll() is None
    # A shutdown signals all processes; only the rank ends.
    for pid in (home._process.pid, rank_of(home)):
        os.kill(pid, signal.SIGTERM)
    assert ended(home) == -signal.SIGTERM and home.runner() is not None
    home.close()
    home._process.wait(PATIENCE)


def test_a_rank_whose_nursery_was_killed_or_hangs_is_lost(home: nursery.Nursery, tmp_path: Path) -> None:
    started(home, tmp_path / "seen", "wait")
    rank = rank_of(home)
    home._process.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    assert home.wait() == nursery.LOST
    assert home.runner() is None and not home.start(["-m", "scripts.rank"], {})
