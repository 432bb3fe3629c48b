# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.believed_plans: plans that hosts brought back, before they say anything of other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told_documents import believed_plans


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"believed_plans": believed_plans}
