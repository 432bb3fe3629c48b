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

from nanochat.data import tokenizer


@pytest.fixture(scope="session")
def tokens() -> tokenizer.Tokenizer:
    return tokenizer.load(HERE / "golden/data/tokenizer")
