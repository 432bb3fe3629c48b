# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pins this rank to processors."""

from __future__ import annotations

import os
import sys


def pin() -> set[int]:
    """Pin this process to NANOCHAT_CORES (0,2,4) before any other thread starts; returns the processors.

    A missing processor makes the run slower, not wrong, so it is only reported.
    """
    text = os.environ.get("NANOCHAT_CORES", "")
    if text and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(number) for number in text.split(",")})
        except (OSError, ValueError) as error:
            print(f"NANOCHAT_CORES is {text}, which is invalid here ({error}); the kernel chooses.", file=sys.stderr)
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
