# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module of the same name; the display is told how much has been installed."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.plugin_utils._growth import GrowingAction, quoted


class ActionModule(GrowingAction):
    """One environment, or one folder of wheels."""

    def growing(self) -> tuple[list[str], int]:
        """The environment, and what pip has fetched for it and not yet unpacked."""
        options = self._task.args
        wheels = options.get("state") == "wheels"
        path = str(options.get("wheels_dir" if wheels else "path") or "")
        if not path:
            return [], 0
        return [quoted(path + ".part" if wheels else path), '"${TMPDIR:-/tmp}"/pip-unpack-*'], 0
