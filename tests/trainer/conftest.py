# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trainer is run from its folder and not installed, so its tests find it by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "trainer"), str(HERE)]
# No test may depend on the speed of the machine.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

from trainings import Job

from nanochat.data import tokenizer

GOLDEN = HERE / "golden/data/tokenizer"


@pytest.fixture(scope="session")
def tokens() -> tokenizer.Tokenizer:
    return tokenizer.load(GOLDEN)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights at the end of a whole run of two ranks."""
    job = Job(tmp_path_factory.mktemp("whole"), 2)
    job.run()
    return job.final_digest()


@pytest.fixture
def base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base folder of what this process runs, with a tokenizer."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "tokenizer").symlink_to(GOLDEN)
    return tmp_path
