# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.checkout_problems."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping

from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.checkout import problems


def checkout_problems(folder: str, flags: Mapping[str, object], script: str) -> Dict[str, List[str]]:
    """Reasons why a checkout's script cannot be started with these flags."""
    return problems(folder, [f"--{name}" for name in flags], script)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        return {"checkout_problems": checkout_problems}
