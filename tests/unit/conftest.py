# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module as Ansible does, but in this process; and the trainer's own side of what the plan counts as well."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args


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
