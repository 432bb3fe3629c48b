# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module as Ansible does, or a verb as a host does, but in this process."""

from __future__ import annotations

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
        return json.loads(json.dumps({"changed": False, **bare.answer_of(verb, params, {"check": _check_mode})}))

    return run


@pytest.fixture
def agent(monkeypatch):
    """`agent(verb, variables, check, prints, **params)` returns the action's result, without Ansible around it; prints: the answer of the
    host that is asked, through a connection, and delegate: its name if the task is delegated."""
    # The Pythons of hosts cannot import the controller's part of Ansible.
    from ansible.plugins.action import ActionBase
    from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
    from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import carrier

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(carrier, "program", lambda *dummy: "")
    monkeypatch.setattr(carrier, "python_of", lambda *dummy: ["python3"])

    def run(verb, variables=None, check=False, prints=None, connection=None, delegate=None, **params):
        task = SimpleNamespace(args={"verb": verb, **params}, check_mode=check, delegate_to=delegate, environment=None)
        made = ActionModule(task, connection or SimpleNamespace(has_pipelining=True), None, None, None, None)
        answer = {"stdout": carrier.MARK + json.dumps(prints)}
        monkeypatch.setattr(made, "_low_level_execute_command", lambda *dummy, **more: answer)
        known = {"hostvars": {delegate: {}}, **(variables or {})} if delegate else variables
        return dict(made.run(task_vars=known))

    return run
