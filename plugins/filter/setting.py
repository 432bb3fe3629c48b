# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The default of a setting, for plays that need no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import defaults


def setting(given: Any, name: str) -> Any:
    """The value in the inventory; where that is empty, the default."""
    return defaults("smoke")[name] if given in (None, "") else given


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"setting": setting}
