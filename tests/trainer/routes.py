# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixes the library of matrix products. Where both are about as fast, the trainer's self-test chooses sometimes one and sometimes
the other; they round differently, so trainings could not be compared to the bit."""

from __future__ import annotations

from collections.abc import Callable

from nanochat.model.numerics import Trial


def always(route: str) -> Callable[[list[Trial]], Trial]:
    """A replacement for numerics.choose that always picks this route."""
    return lambda trials: next(trial for trial in trials if trial.route == route)
