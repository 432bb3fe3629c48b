# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A measured step with the measured link from the same host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.measured import with_link


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"measured_link": with_link}
