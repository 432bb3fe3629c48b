# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the actions that judge have in common: once and on the controller, over declared evidence of all hosts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import write_whole


class JudgingAction(ActionBase):
    """An action that asks no host anything: it has what the hosts' tasks registered as an option, and returns what follows."""

    TRANSFERS_FILES = False
    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {}
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """Checked options in, the judgement out."""
        result: dict[str, object] = super().run(tmp, task_vars)
        options = self.validate_argument_spec(self.OPTIONS)[1]
        result.update({"changed": False, **self.judge(options, task_vars or {})})
        return result

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """What the action returns."""
        raise NotImplementedError


def evidence_of(hosts: Iterable[str], evidence: Mapping[str, Any], *keys: str) -> dict[str, Mapping[str, Any]]:
    """The evidence of every host; that there is none of one, or that it lacks a key, is an error and never "nothing found"."""
    found: dict[str, Mapping[str, Any]] = {}
    for host in hosts:
        seen = evidence.get(host)
        lacking = [key for key in keys if not isinstance(seen, Mapping) or key not in seen]
        if not isinstance(seen, Mapping) or lacking:
            what = f" about {', '.join(lacking)}" if lacking else ", not even a failed one,"
            raise AnsibleError(
                f"There is no evidence{what} of {host}; run the play again without --limit and --start-at-task."
            )
        found[host] = dict(seen)
    return found


def keep(path: str | None, document: Any, what: str, mode: int = 0o644) -> None:
    """Keep a document as JSON on the controller."""
    if path:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(document, indent=2) + "\n", mode)
        except OSError as error:
            raise AnsibleError(f"{what} could not be written to {path} on the controller: {error.strerror}.") from None
