# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The measured step that counts, out of one for each set of processors and each precision of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.measured import best_of_all


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"best_measured": best_of_all}
