# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module of the same name; the display is told how much has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.nanochat.ddp.plugins.plugin_utils._growth import GrowingAction, quoted


def total_bytes(manifest: Any) -> int:
    """What all files of a manifest come to."""
    if not isinstance(manifest, Mapping):
        return 0
    files = [one for part in manifest.values() if isinstance(part, (list, tuple)) for one in part]
    return sum(int(one.get("bytes") or 0) for one in files if isinstance(one, Mapping))


class ActionModule(GrowingAction):
    """One state of one folder."""

    def growing(self) -> tuple[list[str], int]:
        """The folder, where the state brings something into it."""
        options = self._task.args
        if options.get("state", "synced") not in ("synced", "fetched", "imported") or not options.get("path"):
            return [], 0
        return [quoted(str(options["path"]))], total_bytes(options.get("manifest"))
