# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The priority of a job that is to yield to everything else on its machine (ddp_polite low and guest)."""

from __future__ import annotations

import contextlib
import os
import time

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file

VARIABLE = "NANOCHAT_POLITE"
OFF = "off"
FIRST_TO_BE_KILLED = "1000"
LOWEST = 19


def is_polite(path: str | None) -> bool:
    """Whether the environment file of a job asks for it."""
    env = env_file.parse((env_file.read(path) if path else None) or b"") or {}
    return env.get(VARIABLE, OFF) != OFF


def yield_to_others(proc: str = "/proc/self") -> None:
    """For this process and all that it starts: processor time and disk only when nobody else wants them, and the first to be
    killed when memory runs out. Nothing of it takes rights; what a kernel or container refuses is left as it is."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    # Disk I/O of such a process is of the idle class, too.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        _write(os.path.join(proc, "oom_score_adj"), FIRST_TO_BE_KILLED)
    # Where the kernel divides among sessions first (sched_autogroup), priorities count within one only.
    for dummy in range(5):
        try:
            _write(os.path.join(proc, "autogroup"), str(LOWEST))
            return
        except BlockingIOError:
            # The kernel takes one such wish in a tenth of a second, of all processes together.
            time.sleep(0.11)
        except OSError:
            return


def _write(path: str, text: str) -> None:
    with open(path, "r+", encoding="ascii") as file:
        file.write(text)
