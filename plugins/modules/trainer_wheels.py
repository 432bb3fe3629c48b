#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_wheels
short_description: Fetch the trainer's packages for hosts that cannot reach a package index
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Downloads the pinned packages as wheels into a folder, from which M(nanochat.ddp.trainer_venv) installs them with
    O(nanochat.ddp.trainer_venv#module:offline=true).
  - They may be for another Python and architecture than this host's.
extends_documentation_fragment:
  - nanochat.ddp.changer
  - nanochat.ddp.packages
  - nanochat.ddp.packages.lock
attributes:
  diff_mode:
    description: Wheels are not shown.
    support: none
options:
  path:
    description: The folder of this host's environment, whose pip is used if it is there.
    type: path
    required: true
  wheels_dir:
    description: The folder for the wheels.
    type: path
    required: true
  target:
    description: The Python and architecture of the hosts that the wheels are for; by default this host's.
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
  confirm:
    description:
      - Fetch nothing, but ask the indexes that this host can reach whether they list these files, which another, untrusted host fetched.
    type: list
    elements: dict
    suboptions:
      name:
        description: The name of a wheel.
        type: str
        required: true
      sha256:
        description: Its digest.
        type: str
        required: true
      bytes:
        description: Its size, which is ignored.
        type: int
"""

EXAMPLES = r"""
- name: Fetch the packages once for the hosts that cannot reach an index
  nanochat.ddp.trainer_wheels:
    path: /mnt/data/nanochat/venv
    wheels_dir: /mnt/data/nanochat/wheels
    requirements: [torch==2.13.0]
    target: {python: "3.11", machine: x86_64}
"""

RETURN = r"""
python_version:
  description: The version of the interpreter that fetched them, without its last part.
  returned: success
  type: str
  sample: '3.11'
unconfirmed:
  description: The files of O(confirm) that no index lists, or for which no index can be asked here.
  returned: with O(confirm)
  type: list
  elements: str
reason:
  description: Why it failed, in one word (V(network) if no package index answers).
  returned: failure
  type: str
  sample: network
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.confirm import unconfirmed
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.module import SPEC, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import fetch_wheels, wheels_ready
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import Venv

ARGUMENTS = {
    **SPEC,
    "wheels_dir": {"type": "path", "required": True},
    "target": {
        "type": "dict",
        "options": {"python": {"type": "str", "required": True}, "machine": {"type": "str", "required": True}},
    },
    "confirm": {
        "type": "list",
        "elements": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "sha256": {"type": "str", "required": True},
            "bytes": {"type": "int"},
        },
    },
}


def wheels(module: AnsibleModule, venv: Venv) -> dict[str, object]:
    """Fetches wheels, or confirms them, with the environment's pip if there is one, else with the interpreter's."""
    python = venv.python if os.path.exists(venv.python) else venv.base.path
    if module.params["confirm"] is not None:
        pip = [python, "-m", "pip"]
        found = unconfirmed(module.params["confirm"], venv.wanted.torch_index, venv.run, pip)
        return {"changed": False, "unconfirmed": found}
    target = module.params["target"] or {key: venv.base.tags[key] for key in ("python", "machine")}
    changed = not wheels_ready(venv.wanted, target)
    if changed and not module.check_mode:
        fetch_wheels(venv.wanted, venv.run, venv.base, [python, "-m", "pip"], target)
    return {"changed": changed}


def main() -> None:
    module = checked_module(argument_spec=ARGUMENTS, bounds={"lock_seconds": (0, 86400)}, supports_check_mode=True)
    run_module(module, wheels, leaves_foreign=False)


if __name__ == "__main__":
    main()
