# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.flag_words."""

from __future__ import annotations

from typing import Any, Callable, Dict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import flag_words


class FilterModule:
    """Filters of this file."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        return {"flag_words": flag_words}
