# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible callback for bench/hosts.py: counts tasks, and the hosts for which each was executed or skipped."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    """Writes [name, executions, seconds until the next task] of every task to $COUNT_TASKS_FILE."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "count_tasks"

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[list[Any]] = []
        self.begun = time.monotonic()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        if task.action in C._ACTION_META:
            return  # runs in ansible-playbook itself
        self.end_task()
        self.tasks.append([task.get_name(), 0, 0.0])

    def end_task(self) -> None:
        now = time.monotonic()
        if self.tasks:
            self.tasks[-1][2] = round(now - self.begun, 3)
        self.begun = now

    def count(self, result: Any, ignore_errors: bool = False) -> None:
        """Count a result; Ansible starts a process for each, skipped or not."""
        if result.task.action not in C._ACTION_META:
            self.tasks[-1][1] += 1

    v2_runner_on_ok = v2_runner_on_failed = v2_runner_on_skipped = v2_runner_on_unreachable = count

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self.end_task()
        Path(os.environ["COUNT_TASKS_FILE"]).write_text(json.dumps(self.tasks), encoding="utf-8")
