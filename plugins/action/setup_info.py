# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""setup_info without a module; the controller knows the digests of the trainer's files."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import setup_look
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.files import digests_of
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import BareAction
from ansible_collections.nanochat.ddp.plugins.plugin_utils._sources import sources


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = setup_look

    def arguments(self, variables: Mapping[str, object]) -> dict[str, object]:
        """Host names are the inventory's."""
        host = self._task.args.get("host") or variables.get("inventory_hostname")
        return {"files": digests_of(sources(self._task.args)), "host": host}
