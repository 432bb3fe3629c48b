# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Refuses hosts whose runs read different files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible_collections.nanochat.ddp.plugins.plugin_utils._judging import JudgingAction, evidence_of


class ActionModule(JudgingAction):
    """Compares what shard_links returned on every host."""

    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {
        "hosts": {"type": "list", "elements": "str", "required": True},
        "master": {"type": "str", "required": True},
        "evidence": {"type": "dict", "required": True},
    }

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """Fails with a sentence for each host that differs from the one that made the data set."""
        master = options["master"]
        seen = evidence_of([master, *options["hosts"]], options["evidence"], "digest")
        right = seen[master]["digest"]
        differing = [
            f"{host} reads other files than {master}: {one['digest']} in its run folder, {right} there. "
            "Run --tags data again, with -e data_verify=full if it persists."
            for host, one in seen.items()
            if one["digest"] != right
        ]
        return {"failed": bool(differing), "msg": "\n".join(differing)}
