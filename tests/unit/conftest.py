# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module as Ansible does, or a verb as a host does, but in this process."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare


@pytest.fixture
def run_module(capsys, monkeypatch):
    """`run_module(module, _check_mode=False, **options)` returns what the module printed, as a dictionary."""
    # The system's log is not the test's to write to.
    monkeypatch.setattr(basic.AnsibleModule, "_log_to_syslog", lambda self, message: None)

    def run(module, _check_mode=False, **options):
        arguments = {**options, "_ansible_check_mode": _check_mode, "_ansible_diff": True}
        capsys.readouterr()
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the modules, as they come."""
    said: list[str] = []
    monkeypatch.setattr(basic.AnsibleModule, "warn", lambda self, text: said.append(text))
    return said


@pytest.fixture
def call():
    """`call(verb, _check_mode=False, **params)` returns the answer of a host to a verb."""

    def run(verb, _check_mode=False, **params):
        told = {"check": _check_mode} if "check" in inspect.signature(verb).parameters else {}
        return json.loads(json.dumps({"changed": False, **bare.answer_of(verb, {**params, **told})}))

    return run


@pytest.fixture
def agent(monkeypatch):
    """`agent(verb, variables, check, **params)` returns the action's result, without Ansible around it."""
    # The Pythons of hosts cannot import the controller's part of Ansible.
    from ansible.plugins.action import ActionBase
    from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def run(verb, variables=None, check=False, **params):
        task = SimpleNamespace(args={"verb": verb, **params}, check_mode=check, delegate_to=None)
        return dict(ActionModule(task, None, None, None, None, None).run(task_vars=variables))

    return run
