# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes a host without a module."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from ..module_utils._contract.probe import Probe
from ..module_utils._probe import host
from ..plugin_utils._look import BareAction


class ActionModule(BareAction):
    """The module of the same name."""

    CODE: ClassVar[ModuleType] = host
    ANSWER: ClassVar[Mapping[str, Any]] = {"probe": Probe}

    def told_by_ansible(self) -> dict[str, object]:
        """Ansible's folder on the host, from the inventory or its settings."""
        return {"remote_tmp": self.get_shell_option("remote_tmp", default="~/.ansible/tmp")}
