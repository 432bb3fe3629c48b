# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict over the evidence of all ranks, once and on the controller; the reasoning is in module_utils/_doctor/judge.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.bundle import bundle
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.judge import diagnose
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import write_json

OPTIONS = {
    "plan": {"type": "dict", "required": True},
    "evidence": {"type": "dict", "required": True},
    "stall_factor": {"type": "float", "default": 5.0},
    "secrets": {"type": "list", "elements": "dict", "default": []},
    "file": {"type": "path"},
}


class ActionModule(ActionBase):
    """Judges what every host's task registered, and keeps all of it in a file."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        options = self.validate_argument_spec(OPTIONS)[1]
        plan, evidence = options["plan"], options["evidence"]
        missing = [node["host"] for node in plan["nodes"] if node["host"] not in evidence]
        if missing:
            raise AnsibleError(f"There is no evidence, not even a failed one, of {', '.join(missing)}.")
        told = diagnose(plan, {node["host"]: evidence[node["host"]] for node in plan["nodes"]}, options["stall_factor"])
        summary = {"verdict": told["verdict"], "summary": told["evidence"]}
        self.write(options["file"], bundle(plan, evidence, options["secrets"], summary))
        result.update(told, changed=False, text=text_of(told, options["file"]))
        return result

    @staticmethod
    def write(path: str | None, document: Mapping[str, Any]) -> None:
        """Keep it on the controller, for its owner alone."""
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_json(path, document, 0o600)
            except OSError as error:
                raise AnsibleError(
                    f"The evidence could not be written to {path} on the controller: {error.strerror}."
                ) from None


def text_of(told: Mapping[str, Any], path: str | None) -> str:
    """The verdict for people."""
    verdict = told["verdict"]
    lines = [f"{verdict['code']}: {verdict['seen']}", f"  why: {verdict['why']}", f"  do:  {verdict['remedy']}"]
    lines += [f"  {line}" for line in told["evidence"]]
    return "\n".join([*lines, *([f"  all of it: {path}"] if path else [])])
