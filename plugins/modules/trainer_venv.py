#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_venv
short_description: A Python virtual environment with pinned packages for the trainer
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Makes a virtual environment that holds exactly the pinned packages, torch among them, and says what it holds.
  - An environment that was left half-built is built again. One that somebody else made is used as it is if it has the
    packages, and never changed.
  - Several nodes on one machine may name the same path; one builds, the others wait and find it ready.
  - Packages come through pip with the user's own C(pip.conf) and C(PIP_) variables applied, or, on hosts without a way to
    a package index, from a folder of wheels.
attributes:
  check_mode:
    description: Says which packages would be installed, and changes nothing.
    support: full
  diff_mode:
    description: Shows the requirements before and after.
    support: full
  idempotent:
    description: A finished environment of the same requirements is left alone.
    support: full
options:
  path:
    description: The folder of the environment.
    type: path
    required: true
  state:
    description:
      - V(present) makes the environment, V(absent) removes it.
      - V(wheels) fetches the packages into O(wheels_dir) for other hosts.
    type: str
    choices: [present, absent, wheels]
    default: present
  host:
    description: Name of this host in messages; by default its own host name.
    type: str
  requirements:
    description: Requirements as pip takes them, pinned with C(==).
    type: list
    elements: str
    default: []
  python:
    description: The interpreter, a name or a path; by default the first of C(python3.11), C(python3.12), C(python3.13), C(python3)
      that is recent enough.
    type: str
  python_minimum:
    description: The oldest Python that can be used.
    type: str
    default: '3.10'
  torch_index:
    description:
      - Where torch is looked for first. V(auto) is PyTorch's own index of CPU builds, V(default) asks no other index than
        the user's own.
      - An index that does not answer at once is passed over, with a warning, in favour of the user's own.
    type: str
    default: auto
  wheels_dir:
    description: A folder of wheels, read with O(offline=true) and written with O(state=wheels).
    type: path
  offline:
    description: Install from O(wheels_dir) only.
    type: bool
    default: false
  target:
    description: With O(state=wheels), the Python and architecture of the hosts that the wheels are for; by default this host's.
    type: dict
    suboptions:
      python:
        description: Such as V(3.11).
        type: str
        required: true
      machine:
        description: Such as V(x86_64).
        type: str
        required: true
  lock_seconds:
    description: How long another process may take to build the same path.
    type: int
    default: 1800
"""

EXAMPLES = r"""
- name: Make the trainer's environment
  nanochat.ddp.trainer_venv:
    path: /home/xiaoxin/nanochat/venv
    requirements:
      - torch==2.13.0
      - numpy==2.4.6

- name: Fetch the packages once for the hosts that reach no index
  nanochat.ddp.trainer_venv:
    path: /mnt/data/nanochat/venv
    state: wheels
    wheels_dir: /mnt/data/nanochat/wheels
    requirements: [torch==2.13.0]
    target: {python: "3.11", machine: x86_64}

- name: Install them without an index
  nanochat.ddp.trainer_venv:
    path: /home/xiaoxin/nanochat/venv
    requirements: [torch==2.13.0]
    wheels_dir: /home/xiaoxin/nanochat/wheels
    offline: true
"""

RETURN = r"""
venv:
  description: The environment.
  returned: success
  type: str
python:
  description: The environment's interpreter.
  returned: success
  type: str
  sample: /home/xiaoxin/nanochat/venv/bin/python
python_version:
  description: The version of that interpreter without its last part, which wheels must match.
  returned: success
  type: str
  sample: '3.11'
tags:
  description: What wheels for this host must match.
  returned: always, once an interpreter was found
  type: dict
  sample: {python: '3.11', machine: x86_64, libc: glibc-2.36, kind: 3.11-x86_64}
packages:
  description: Installed versions of what was required; empty in check mode before the environment is made.
  returned: success
  type: dict
  sample: {torch: 2.13.0+cpu, numpy: 2.4.6}
torch:
  description: The version of torch, null without it.
  returned: success
  type: str
  sample: 2.13.0+cpu
torch_is_cpu_build:
  description: Whether that build knows no CUDA; null without torch.
  returned: success
  type: bool
index:
  description: Where the packages came from.
  returned: success
  type: str
  sample: default
install:
  description: The requirements that were (in check mode, would be) installed.
  returned: success
  type: list
  elements: str
reason:
  description: Why it failed, in one word, so that another way can be chosen (V(network) if no package index answers).
  returned: failure
  type: str
  sample: network
"""

import os
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import (
    Interpreter,
    VenvError,
    find_interpreter,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import Wish, fetch_wheels, wheels_ready
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import Venv, building

SPEC = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "default": "present", "choices": ["present", "absent", "wheels"]},
    "host": {"type": "str"},
    "requirements": {"type": "list", "elements": "str", "default": []},
    "python": {"type": "str"},
    "python_minimum": {"type": "str", "default": "3.10"},
    "torch_index": {"type": "str", "default": "auto"},
    "wheels_dir": {"type": "path"},
    "offline": {"type": "bool", "default": False},
    "target": {
        "type": "dict",
        "options": {"python": {"type": "str", "required": True}, "machine": {"type": "str", "required": True}},
    },
    "lock_seconds": {"type": "int", "default": 1800},
}
NO_PYTHON = Interpreter("", (3, 0, 0), "", False, False, False, "")
# pip must install into the environment whatever the user's settings say about other places; the rest of them stands.
PIP_ENVIRONMENT = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PYTHONPATH": ""}


def present(module: AnsibleModule, venv: Venv) -> dict[str, Any]:
    """Brings the environment about, unless it is there."""
    before = venv.stamp().get("requirements", [])
    state = venv.state()
    found: dict[str, Any] = {"packages": {}, "cuda": None}
    is_ready = state == "ready"
    if state == "foreign":
        found = venv.packages()
        is_ready = not venv.lacking(found["packages"])
    if not is_ready and not module.check_mode:
        venv.build(state)
    if is_ready or not module.check_mode:
        found = {**venv.stamp(), **venv.packages()}
    for warning in venv.warnings:
        module.warn(warning)
    after = sorted(venv.wish.requirements)
    return {
        "changed": not is_ready,
        "packages": found["packages"],
        "torch": found["packages"].get("torch"),
        "torch_is_cpu_build": found["cuda"] is None if found["packages"].get("torch") else None,
        "index": found.get("index") or venv.index,
        "install": [] if is_ready else after,
        "diff": diff(after if is_ready else before, after),
    }


def diff(before: list[str], after: list[str]) -> dict[str, str]:
    return {"before": "".join(f"{one}\n" for one in before), "after": "".join(f"{one}\n" for one in after)}


def absent(module: AnsibleModule, venv: Venv) -> dict[str, Any]:
    """Removes the environment, and nothing that only has its path."""
    state = venv.state()
    if state in ("occupied", "foreign"):
        raise VenvError(
            f"{venv.wish.host}: {venv.wish.path} was not made by this collection, so it is left alone", "occupied"
        )
    before = venv.stamp().get("requirements", [])
    if not module.check_mode:
        venv.refuse_in_use()
        venv.discard()
        os.unlink(venv.wish.path + ".lock")
    return {"changed": state != "absent", "packages": {}, "install": [], "diff": diff(before, [])}


def wheels(module: AnsibleModule, venv: Venv) -> dict[str, Any]:
    """Fetches wheels with the environment's pip if there is one, else with the interpreter's."""
    target = module.params["target"] or {key: venv.base.tags[key] for key in ("python", "machine")}
    changed = not wheels_ready(venv.wish, target)
    if changed and not module.check_mode:
        python = venv.python if os.path.exists(venv.python) else venv.base.path
        fetch_wheels(venv.wish, venv.run, venv.base, [python, "-m", "pip"], target)
    return {"changed": changed, "packages": {}, "install": [], "diff": diff([], [])}


STATES = {"present": present, "absent": absent, "wheels": wheels}


def main() -> None:
    module = checked_module(
        argument_spec=SPEC,
        bounds={"lock_seconds": (0, 86400)},
        supports_check_mode=True,
        required_if=[("state", "wheels", ["wheels_dir"]), ("offline", True, ["wheels_dir"])],
    )
    given = module.params
    host = given["host"] or platform.node()
    requirements = tuple(one.strip() for one in given["requirements"] if one.strip())
    wish = Wish(
        host, given["path"].rstrip("/"), requirements, given["torch_index"], given["wheels_dir"] or "", given["offline"]
    )
    environ = {**PIP_ENVIRONMENT, "LC_ALL": "C.UTF-8"}

    def run(argv: list[str]) -> tuple[int, str, str]:
        try:
            rc, out, err = module.run_command(argv, environ_update=environ, handle_exceptions=False)
        except OSError as why:
            return 127, "", f"{argv[0]}: {why.strerror}"
        return int(rc), str(out), str(err)

    tags: dict[str, str] | None = None
    try:
        # To remove an environment takes no Python that could make one.
        base = NO_PYTHON
        if given["state"] != "absent":
            base = find_interpreter(run, module.get_bin_path, given["python"] or "", given["python_minimum"], host)
        tags = base.tags
        venv = Venv(wish, run, base)
        # An environment of somebody else's is only read, and may lie where this user cannot even put a lock.
        only_read = given["state"] != "wheels" and venv.state() == "foreign"
        if module.check_mode or only_read:
            result = STATES[given["state"]](module, venv)
        else:
            with building(wish.path, host, given["lock_seconds"]):
                result = STATES[given["state"]](module, venv)
    except VenvError as why:
        module.fail_json(msg=str(why), reason=why.reason, tags=tags)
    except OSError as why:
        module.fail_json(msg=f"{host}: {why.filename or wish.path}: {why.strerror or why}", reason="folder", tags=tags)
    module.exit_json(venv=wish.path, python=venv.python, python_version=base.minor, tags=tags, **result)


if __name__ == "__main__":
    main()
