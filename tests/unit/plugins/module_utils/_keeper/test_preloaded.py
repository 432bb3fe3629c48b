# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A preloaded trainer that its keeper can no longer trust; test_keeper.py starts ranks from one that works."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import preloaded
from ansible_collections.nanochat.ddp.tests.integration.local import until

PATIENCE = 60
ROOT = Path(__file__).resolve().parents[5]
RANK = "import os, time\nopen(os.environ['SEEN'], 'w').close()\ntime.sleep(600)\n"


def test_a_rank_whose_preloaded_trainer_was_killed_or_hangs_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/preloaded.py").symlink_to(ROOT / "trainer/scripts/preloaded.py")
    (tmp_path / "scripts/rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    home = preloaded.PreloadedTrainer(sys.executable, ["no.such.module"])
    try:
        assert home.start(["-m", "scripts.rank"], {"SEEN": str(tmp_path / "seen")})
        until((tmp_path / "seen").exists, PATIENCE)
        pid = home._process.pid
        rank = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        home._process.send_signal(signal.SIGSTOP)
        os.kill(rank, signal.SIGKILL)
        assert home.wait() == preloaded.LOST
        assert home.runner() is None and not home.start(["-m", "scripts.rank"], {})
    finally:
        home._process.kill()
        home._process.wait()
