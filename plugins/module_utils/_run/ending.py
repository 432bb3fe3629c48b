# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a run with a budget, in words."""

from __future__ import annotations

from typing import Callable, Optional

from .._kit.words import clock_text, seconds_text


def ends_text(at: float, share: Optional[float], clock: Callable[[float], str] = clock_text) -> str:
    """Such as `ends at 07:28, 61 % done`."""
    done = "" if share is None else ", %.0f %% done" % (100 * share)
    return "ends at %s%s" % (clock(at), done)


def ended_text(ended: float, ends: float, given: Optional[str], clock: Callable[[float], str] = clock_text) -> str:
    """Such as `ended at 07:28, 2 min 00 s early, of a budget until 07:30`; given: as the user wrote it."""
    off = seconds_text(abs(ends - ended))
    budget = "a budget" if given is None else "a budget %s %s" % ("until" if ":" in given else "of", given)
    return "ended at %s, %s %s, of %s" % (clock(ended), off, "early" if ended <= ends else "late", budget)
