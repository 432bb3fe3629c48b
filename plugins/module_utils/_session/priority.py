# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lowest priority for a job that yields to all other programs (ddp_polite low and guest)."""

from __future__ import annotations

import contextlib
import os
import time

from .._contract.politeness import OFF, VARIABLE
from .._kit import env_file

FIRST_TO_BE_KILLED = "1000"
LOWEST = 19


def is_polite(path: str | None) -> bool:
    """Whether a job's environment file asks for it."""
    env = env_file.parse((env_file.read(path) if path else None) or b"") or {}
    return env.get(VARIABLE, OFF) != OFF


def yield_to_others(proc: str = "/proc/self") -> None:
    """Give this process and its children CPU and disk only when no other program wants them, and let them be killed first when
    memory runs out. Needs no root; whatever the kernel or container refuses is skipped."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    # This also makes disk I/O idle class.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        _write(os.path.join(proc, "oom_score_adj"), FIRST_TO_BE_KILLED)
    # With sched_autogroup the kernel schedules sessions first, and priorities count only within one.
    for dummy in range(5):
        try:
            _write(os.path.join(proc, "autogroup"), str(LOWEST))
            return
        except BlockingIOError:
            # The kernel accepts one such change per 0.1 s, system-wide.
            time.sleep(0.11)
        except OSError:
            return


def _write(path: str, text: str) -> None:
    with open(path, "r+", encoding="ascii") as file:
        file.write(text)
