# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.checkout_problems."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._plan.stages import BASE, SCRIPTS
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.checkout import problems


def checkout_problems(folder: str, argv: Sequence[str]) -> Dict[str, List[str]]:
    """What stands against starting a checkout with a rank's command."""
    script = next((word for word in argv if word in SCRIPTS.values()), SCRIPTS[BASE])
    own = list(argv[argv.index(script) + 1 :]) if script in argv else []
    return problems(folder, [word.split("=")[0] for word in own if word.startswith("--") and word != "--"], script)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        return {"checkout_problems": checkout_problems}
