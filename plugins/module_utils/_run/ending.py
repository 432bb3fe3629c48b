# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of a run with a budget: when, in words, and the bits per byte to expect by then."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, TypedDict

from .._contract.document import Document, section
from .._contract.training import Curve, curve_of
from .._kit.words import clock_text, seconds_text


class Expected(TypedDict):
    """Bits per byte at the end of a run, and the finished run that the estimate goes by."""

    val_bpb: float
    like: str


def expected(training: Optional[Document], run: Mapping[str, Any]) -> Optional[Expected]:
    """From training.json and the last evaluation: the rest is assumed to lower it as much as in the similar run."""
    bits, share, like = run["val_bpb"], run["val_share"], curve_of(section(training, "like"))
    then = like and share is not None and _bits_at(like, share)
    if not like or not then or bits is None:
        return None
    return {"val_bpb": bits * like["evals"][-1][1] / then, "like": like["run"]}


def _bits_at(curve: Curve, share: float) -> Optional[float]:
    """Interpolated between two evaluations; None outside them."""
    evals = curve["evals"]
    for (before, bits), (after, fewer) in zip(evals, evals[1:]):
        if before <= share <= after and before < after:
            return bits + (fewer - bits) * (share - before) / (after - before)
    return None


def ends_text(at: float, share: Optional[float], clock: Callable[[float], str] = clock_text) -> str:
    """Such as `ends at 07:28, 61 % done`."""
    done = "" if share is None else ", %.0f %% done" % (100 * share)
    return "ends at %s%s" % (clock(at), done)


def ended_text(ended: float, ends: float, given: Optional[str], clock: Callable[[float], str] = clock_text) -> str:
    """Such as `ended at 07:28, 2 min 00 s early, of a budget until 07:30`; given: as the user wrote it."""
    off = seconds_text(abs(ends - ended))
    budget = "a budget" if given is None else "a budget %s %s" % ("until" if ":" in given else "of", given)
    return "ended at %s, %s %s, of %s" % (clock(ended), off, "early" if ended <= ends else "late", budget)


def expected_text(one: Expected) -> str:
    """Such as `expected at the end: about 0.912 bits per byte, if it goes on like by-8h`."""
    return "expected at the end: about %.3g bits per byte, if it goes on like %s" % (one["val_bpb"], one["like"])
