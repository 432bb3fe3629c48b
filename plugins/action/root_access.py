# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs `id -u` with the task's become settings; a missing password is an answer, not an error."""

from __future__ import annotations

import re
from typing import ClassVar

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """One command over the connection; any other task with become is `fatal` if sudo needs a missing password."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True
    _VALID_ARGS: ClassVar[frozenset[str]] = frozenset()

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        result: dict[str, object] = super().run(tmp, task_vars)
        given = bool(self._connection.become and self._connection.become.get_option("become_pass"))
        try:
            answer = self._low_level_execute_command("id -u")
        except AnsibleConnectionFailure:
            raise  # the host is reported as unreachable
        except AnsibleError as why:
            return {**result, **access(False, given, str(why))}
        # A login shell may print something first.
        is_root = answer["rc"] == 0 and answer["stdout"].split()[-1:] == ["0"]
        return {**result, **access(is_root, given, answer["stderr"] or answer["stdout"])}


def access(is_root: bool, given: bool, said: str) -> dict[str, object]:
    """The result of the task; of sudo's or Ansible's message the line that names the reason, without prompt, lecture and report."""
    prompts = re.sub(r"\[\w+ via ansible, key=\w+\] password:", "\n", said)
    lines = [line.strip().rstrip(".") for line in prompts.splitlines() if line.strip() and "This incident" not in line]
    return {"changed": False, "root": is_root, "given": given, "why": "" if is_root or not lines else lines[-1]}
