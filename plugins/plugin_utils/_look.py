# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A look at a run that costs the host next to nothing.

A module starts a Python with all of Ansible's own code, which takes five times as long as reading the run folder. Whoever looks every few
seconds sends the bare code that reads instead, to a Python that loads nothing else.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.module_utils import _run_state

MARK = "nanochat-ddp-look "
DEFAULTS: dict[str, Any] = {name: option.get("default") for name, option in _run_state.LOOK.items()}
IMPORTED = re.compile(r"^from (ansible_collections\.nanochat\.ddp\.plugins\.module_utils\._\w+) import", re.M)
# What the host runs: our files as the modules that they are, and nothing of Ansible. The host expands paths, its home is another than ours.
PROGRAM = """
import json, os, sys, types
def known(name, source):
    whole = ""
    for part in name.split(".")[:-1]:
        whole = whole + "." + part if whole else part
        if whole not in sys.modules:
            sys.modules[whole] = types.ModuleType(whole)
            sys.modules[whole].__path__ = []
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), sys.modules[name].__dict__)
    return sys.modules[name]
given = json.loads({given!r})
for name, source in given["sources"]:
    last = known(name, source)
params = given["params"]
for name in ("run_dir", "base_dir"):
    if params[name]:
        params[name] = os.path.expanduser(os.path.expandvars(params[name]))
print(given["mark"] + json.dumps(last.look(params)))
"""


def sources_of(name: str) -> list[tuple[str, str]]:
    """A module of ours and those that it imports, each after what it needs."""
    source = Path(str(importlib.import_module(name).__file__)).read_text(encoding="utf-8")
    needed = [one for other in IMPORTED.findall(source) for one in sources_of(other)]
    return [*dict.fromkeys(needed), (name, source)]


def program(params: dict[str, Any]) -> str:
    """The code that looks, with what it is to look at."""
    given = {"sources": sources_of(_run_state.__name__), "params": {**DEFAULTS, **params}, "mark": MARK}
    return PROGRAM.format(given=json.dumps(given))


def python_of(action: ActionBase, variables: dict[str, Any]) -> str:
    """The Python that the inventory names or Ansible has found, else the host's own."""
    named = action._templar.template(variables.get("ansible_python_interpreter"))
    found = (variables.get("ansible_facts") or {}).get("discovered_interpreter_python")
    return next((str(one) for one in (named, found) if one and str(one).startswith("/")), "python3")


def quick_look(action: ActionBase, params: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any] | None:
    """What run_info says of a run; None where this way does not work, and the module has to be asked."""
    if not action._connection.has_pipelining:
        return None
    argv = [python_of(action, variables), "-I", "-S", "-"]
    answer = action._low_level_execute_command(shlex.join(argv), in_data=program(params).encode())
    for line in reversed(str(answer.get("stdout") or "").splitlines()):
        if line.startswith(MARK):
            return {"changed": False, "run": json.loads(line[len(MARK) :])}
    return None
