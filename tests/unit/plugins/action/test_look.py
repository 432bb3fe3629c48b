# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which Python of a host a look is sent to."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import (
    FOUND,
    bare_answer,
    discovered,
    python_of,
    result_in,
)

ACTION: Any = SimpleNamespace(_templar=SimpleNamespace(template=lambda value: value))


@pytest.mark.parametrize(
    "variables",
    [
        {
            "ansible_python_interpreter": "/opt/python",
            "ansible_facts": {"discovered_interpreter_python": "/usr/bin/other"},
        },
        {
            "ansible_python_interpreter": "auto_silent",
            "ansible_facts": {"discovered_interpreter_python": "/opt/python"},
        },
    ],
)
def test_the_python_of_the_inventory_or_of_ansible_is_taken(variables):
    assert python_of(ACTION, variables) == ["/opt/python"]


def test_before_ansible_has_looked_it_is_the_one_that_ansible_will_find(tmp_path):
    for name in ("python3", "python3.11", "python3.9"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        path.chmod(0o755)
    # pyenv has a shim for every version that any of its environments has.
    (tmp_path / "python3.12").write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    (tmp_path / "python3.12").chmod(0o755)
    argv = [
        *python_of(
            ACTION, {"ansible_interpreter_python_fallback": ["python3.13", "python3.12", "python3.11", "python3"]}
        ),
        "-I",
        "-",
    ]
    told = subprocess.run(
        ["/bin/sh", *argv[1:]], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"{FOUND}{tmp_path}/python3.11\npython3.11 -I -\n"


@pytest.mark.parametrize(
    ("lines", "delegate", "facts"),
    [
        ([FOUND + "/usr/bin/python3.11"], None, {"discovered_interpreter_python": "/usr/bin/python3.11"}),
        ([FOUND + "/usr/bin/python3.11"], "other", None),
        (["a motto"], None, None),
    ],
)
def test_the_modules_of_ansible_take_the_python_that_was_found(lines, delegate, facts):
    action: Any = SimpleNamespace(_task=SimpleNamespace(delegate_to=delegate))
    assert discovered(action, lines).get("ansible_facts") == facts


def test_a_host_without_any_python_is_asked_by_the_module(tmp_path):
    argv = [*python_of(ACTION, {"ansible_interpreter_python_fallback": ["python3.13"]}), "-"]
    done = subprocess.run(["/bin/sh", *argv[1:]], env={"PATH": str(tmp_path)}, check=False)
    assert done.returncode == 127


@pytest.mark.parametrize(
    "key",
    [
        "add_host",
        "add_group",
        "ansible_facts",
        "ansible_stats",
        "ansible_playbook_python",
        "_ansible_no_log",
        "_ansible",
    ],
)
def test_a_hosts_answer_gives_ansible_no_orders(key):
    assert result_in(json.dumps({"state": "running", key: {"name": "elsewhere"}})) == {
        "changed": False,
        "state": "running",
    }


def test_without_ansibles_private_way_to_run_code_the_module_is_asked():
    """None means so."""
    action: Any = SimpleNamespace(_connection=SimpleNamespace(has_pipelining=True))
    assert bare_answer(action, json, {}, {}) is None
