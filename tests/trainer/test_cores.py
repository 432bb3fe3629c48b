# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pinning a rank to processors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = (
    "import os; from nanochat.kit.common import pin_to_cores; pin_to_cores(); print(sorted(os.sched_getaffinity(0)))"
)


def pinned(cores: str) -> tuple[list[int], str]:
    environ = {**os.environ, "NANOCHAT_CORES": cores}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.strip("[]\n").split(",")], done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")
def test_field_33_a_rank_stays_on_the_processors_of_the_plan():
    here = sorted(os.sched_getaffinity(0))
    assert pinned(str(here[-1])) == ([here[-1]], "")
    assert pinned(",".join(map(str, here))) == (here, "")
    assert pinned("") == (here, "")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")
@pytest.mark.parametrize("cores", ["9999", "x"])
def test_processors_that_are_gone_are_told_and_harm_nothing(cores):
    found, said = pinned(cores)
    assert found == sorted(os.sched_getaffinity(0))
    assert f"NANOCHAT_CORES is {cores}" in said
