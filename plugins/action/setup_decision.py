# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether trainer and data are brought, once for all hosts; the reasoning is in module_utils/_preflight/setup.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.setup import what_is_there
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judging import JudgingAction, evidence_of


class ActionModule(JudgingAction):
    """Judges what setup_info returned for every node."""

    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {
        "plan": {"type": "dict", "required": True},
        "evidence": {"type": "dict", "required": True},
    }

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """Which steps have nothing to bring."""
        hosts = [node["host"] for node in options["plan"]["nodes"]]
        return {**what_is_there(options["plan"], evidence_of(hosts, options["evidence"], "files", "venv", "data"))}
