# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Refuses hosts with different trainers or packages; the comparison is in module_utils/_trainer/agreement.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.agreement import disagreements
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judging import JudgingAction, evidence_of


class ActionModule(JudgingAction):
    """Compares what trainer_files and trainer_venv returned on every host."""

    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {
        "hosts": {"type": "list", "elements": "str", "required": True},
        "files": {"type": "dict", "required": True},
        "venvs": {"type": "dict", "required": True},
    }

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """Fails with a sentence for each host that differs from the first."""
        hosts = options["hosts"]
        files = evidence_of(hosts, options["files"], "digest")
        venvs = evidence_of(hosts, options["venvs"], "venv", "torch", "packages", "python_version")
        differing = list(disagreements(files, venvs))
        return {"failed": True, "msg": ".\n".join(differing) + "."} if differing else {"failed": False}
