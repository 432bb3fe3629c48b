# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes a host without a module; rejects impossible facts."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told import Untrue
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told_documents import checked_probe
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = host

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """The host's facts, validated before use."""
        result = super().run(tmp, task_vars)
        if result.get("failed") or result.get("unreachable"):
            return result
        try:
            return {**result, "probe": checked_probe(result.get("probe"))}
        except Untrue as why:
            name = (task_vars or {}).get("inventory_hostname")
            return {"changed": False, "failed": True, "msg": f"{name} sent invalid facts: {why}"}

    def told_by_ansible(self) -> dict[str, object]:
        """Ansible's folder on the host, from the inventory or its settings."""
        return {"remote_tmp": self.get_shell_option("remote_tmp", default="~/.ansible/tmp")}
