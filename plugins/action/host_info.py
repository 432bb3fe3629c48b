# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probe of a host, which needs no module."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = host

    def told_by_ansible(self) -> dict[str, object]:
        """Its folder on the host, as the inventory or Ansible's settings have it."""
        return {"remote_tmp": self.get_shell_option("remote_tmp", default="~/.ansible/tmp")}
