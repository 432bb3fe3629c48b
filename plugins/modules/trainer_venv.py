#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_venv
short_description: Make a Python virtual environment with the trainer's pinned packages
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Creates a virtual environment with exactly the pinned packages, including torch, and returns their versions.
  - Rebuilds a half-built environment. Uses an environment made by somebody else if it has the packages, and never changes it.
  - Several nodes on one machine may use the same path; one builds it, the others wait.
  - Packages come through pip with the user's own C(pip.conf) and C(PIP_) variables applied, or, on hosts without a way to
    a package index, from a folder of wheels.
extends_documentation_fragment:
  - nanochat.ddp.changer
  - nanochat.ddp.packages
  - nanochat.ddp.packages.lock
options:
  path:
    description: The folder of the environment.
    type: path
    required: true
  state:
    description:
      - V(present) makes the environment, V(absent) removes it.
    type: str
    choices: [present, absent]
    default: present
  wheels_dir:
    description: A folder of wheels, as M(nanochat.ddp.trainer_wheels) fetches them, read with O(offline=true).
    type: path
  offline:
    description: Install from O(wheels_dir) only.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Create the trainer's environment
  nanochat.ddp.trainer_venv:
    path: /home/xiaoxin/nanochat/venv
    requirements:
      - torch==2.13.0
      - numpy==2.4.6

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
  description: Its version without the last part, which wheels must match.
  returned: success
  type: str
  sample: '3.11'
tags:
  description: Tags that wheels for this host must match.
  returned: always, once an interpreter was found
  type: dict
  sample: {python: '3.11', machine: x86_64, libc: glibc-2.36, kind: 3.11-x86_64}
packages:
  description: Installed versions of the requirements; empty in check mode before the environment exists.
  returned: success
  type: dict
  sample: {torch: 2.13.0+cpu, numpy: 2.4.6}
torch:
  description: The version of torch, null without it.
  returned: success
  type: str
  sample: 2.13.0+cpu
torch_is_cpu_build:
  description: Whether that build has no CUDA; null without torch.
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
  description: Reason of the failure in one word, for choosing a fallback (V(network) if no package index answers).
  returned: failure
  type: str
  sample: network
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import words
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import VenvError
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.module import SPEC, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import Venv

ARGUMENTS = {
    **SPEC,
    "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
    "wheels_dir": {"type": "path"},
    "offline": {"type": "bool", "default": False},
}


def present(module: AnsibleModule, venv: Venv) -> dict[str, object]:
    """Brings the environment about, unless it is there."""
    before = words(venv.stamp(), "requirements")
    state, found = venv.look()
    is_ready = state == "ready"
    if not is_ready and not module.check_mode:
        venv.build(state)
        found = venv.packages()
    found = found or {"packages": {}, "cuda": None, "damaged": [], "python": ""}
    index = venv.stamp().get("index") if is_ready or not module.check_mode else None
    for warning in venv.warnings:
        module.warn(warning)
    after = sorted(venv.wanted.requirements)
    return {
        "changed": not is_ready,
        "packages": found["packages"],
        "torch": found["packages"].get("torch"),
        "torch_is_cpu_build": found["cuda"] is None if found["packages"].get("torch") else None,
        "index": index or venv.index,
        "install": [] if is_ready else after,
        "diff": diff(after if is_ready else before, after),
    }


def diff(before: list[str], after: list[str]) -> dict[str, str]:
    return {"before": "".join(f"{one}\n" for one in before), "after": "".join(f"{one}\n" for one in after)}


def absent(module: AnsibleModule, venv: Venv) -> dict[str, object]:
    """Removes the environment, and nothing that only has its path."""
    state = venv.place()
    if state in ("occupied", "foreign"):
        raise VenvError(
            f"{venv.wanted.host}: {venv.wanted.path} was not created by this collection, so it was not changed",
            "occupied",
        )
    before = words(venv.stamp(), "requirements")
    if not module.check_mode:
        venv.refuse_in_use()
        venv.discard()
        os.unlink(venv.wanted.path + ".lock")
    return {"changed": state != "absent", "packages": {}, "install": [], "diff": diff(before, [])}


def main() -> None:
    module = checked_module(
        argument_spec=ARGUMENTS,
        bounds={"lock_seconds": (0, 86400)},
        supports_check_mode=True,
        required_if=[("offline", True, ["wheels_dir"])],
    )
    if module.params["state"] == "absent":
        run_module(module, absent, removes=True)
    else:
        run_module(module, present)


if __name__ == "__main__":
    main()
