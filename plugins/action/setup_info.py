# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""setup_info without a module; the controller knows the digests of the trainer's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from ..module_utils._preflight import setup_look
from ..module_utils._trainer.files import digests_of
from ..plugin_utils._look import BareAction
from ..plugin_utils._sources import sources
from ..plugin_utils._wheels import read_lock


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = setup_look

    def arguments(self, variables: Mapping[str, object]) -> dict[str, object]:
        """Host names are the inventory's."""
        given = self._task.args
        src = Path(str(given.get("src", ""))).expanduser()
        lock = read_lock(src, given.get("packages") or ["trainer"], str(given.get("torch_index", "auto")))
        host = given.get("host") or variables.get("inventory_hostname")
        return {"files": digests_of(sources(given)), "host": host, "digest": lock.digest, "pins": lock.pins}
