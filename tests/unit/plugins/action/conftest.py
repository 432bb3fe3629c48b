# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action that judges, without Ansible around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action.judge import ActionModule


@pytest.fixture
def judge(monkeypatch):
    """`judge(of, variables, check, **options)` returns the action's result."""
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def run(of: str, variables: Any = None, check: bool = False, **options: Any) -> dict[str, Any]:
        task = SimpleNamespace(args={"of": of, **options}, check_mode=check)
        return dict(ActionModule(task, None, None, None, None, None).run(task_vars=variables))

    return run
