# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A look at a run that costs the host next to nothing.

A module starts a Python with all of Ansible's own code, which takes five times as long as reading the run folder. Whoever looks every few
seconds sends the bare code that reads instead, to a Python that loads nothing else.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import section
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code
from ansible_collections.nanochat.ddp.plugins.module_utils._run import look

MARK = "nanochat-ddp-look "
DEFAULTS = {name: option.get("default") for name, option in look.LOOK.items()}


def program(params: Mapping[str, Any]) -> str:
    """The code that looks, with what it is to look at."""
    return host_code.program(look.__name__, "say", MARK, {**DEFAULTS, **params})


def python_of(action: ActionBase, variables: dict[str, object]) -> str:
    """The Python that the inventory names or Ansible has found, else the host's own."""
    named = action._templar.template(variables.get("ansible_python_interpreter"))
    found = section(variables, "ansible_facts").get("discovered_interpreter_python")
    return next((str(one) for one in (named, found) if one and str(one).startswith("/")), "python3")


def quick_look(action: ActionBase, params: Mapping[str, Any], variables: dict[str, object]) -> dict[str, object] | None:
    """What run_info says of a run; None where this way does not work, and the module has to be asked."""
    if not action._connection.has_pipelining:
        return None
    argv = [python_of(action, variables), "-I", "-S", "-"]
    answer = action._low_level_execute_command(shlex.join(argv), in_data=program(params).encode())
    for line in reversed(str(answer.get("stdout") or "").splitlines()):
        if line.startswith(MARK):
            return {"changed": False, "run": json.loads(line[len(MARK) :])}
    return None
