#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_venv
short_description: Make a virtual environment with exactly the packages of a lock
version_added: "0.1.0"
author: The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Makes a virtual environment with uv, from the locks in the trainer's folder on the controller, which name each package's version and the
    digests of its wheels. Nothing is built from sources.
  - Needs neither root nor pip on the host. If the host has no uv of this version, the controller fetches it and copies it.
  - Uses the indexes, folders of wheels, certificate and proxy that pip is configured with on the host, from its files and environment.
  - An environment that this module did not make is used if it has the packages, and never changed.
extends_documentation_fragment:
  - nanochat.ddp.changer
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
  host:
    description: Name of this host in messages; by default its own host name.
    type: str
  src:
    description: The trainer's folder on the controller, which has the locks; by default this collection's.
    type: path
  packages:
    description: The locks to install, without their suffix; V(trainer) is the trainer's own.
    type: list
    elements: str
    default: [trainer]
  python:
    description:
      - The interpreter; by default the one that runs the module.
      - One at C(python/current/bin/python3) of the base folder is downloaded by uv if it is not there.
    type: str
  torch_index:
    description:
      - Where torch comes from. V(auto) is PyTorch's index of CPU builds if it answers, and the host's own indexes; V(default) are only these, with
        the CUDA build that they have; a URL is another index of CPU builds.
    type: str
    default: auto
  wheels_dir:
    description: A folder of wheels, as M(nanochat.ddp.trainer_wheels) fetches them, read with O(offline=true).
    type: path
  offline:
    description: Install from O(wheels_dir) only.
    type: bool
    default: false
  lock_seconds:
    description: How long another process may take to make the same environment.
    type: int
    default: 1800
  lock:
    description: The text of the locks; filled in from O(src).
    type: str
    default: ''
  digest:
    description: The digest of O(lock); filled in.
    type: str
    default: ''
  pins:
    description: The packages of the locks that are checked, with their versions; filled in.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Create the trainer's environment
  nanochat.ddp.trainer_venv:
    path: /home/xiaoxin/nanochat/venv

- name: Create it without an index
  nanochat.ddp.trainer_venv:
    path: /home/xiaoxin/nanochat/venv
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
  description: What wheels for this host must match, and the name of their folder.
  returned: always, once an interpreter was found
  type: dict
  sample: {python: '3.11', machine: x86_64, kind: 3.11-x86_64}
packages:
  description: Installed versions of the checked packages; empty in check mode before the environment exists.
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
  description: Where torch came from.
  returned: success
  type: str
  sample: default
lacks_uv:
  description: The host's architecture if an environment must be made and the host has no uv.
  returned: always
  type: str
reason:
  description: Reason of the failure in one word, for choosing a fallback (V(network) if no package index answers).
  returned: failure
  type: str
  sample: network
"""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils._contract.document import section
from ..module_utils._contract.urls import NO_CREDENTIALS, has_credentials
from ..module_utils._kit.arguments import checked_module
from ..module_utils._trainer.uv_errors import VenvError, VenvSpec
from ..module_utils._trainer.venv import Venv, building, uv_beside

ARGUMENTS = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
    "host": {"type": "str"},
    "src": {"type": "path"},
    "packages": {"type": "list", "elements": "str", "default": ["trainer"]},
    "python": {"type": "str"},
    "torch_index": {"type": "str", "default": "auto"},
    "wheels_dir": {"type": "path"},
    "offline": {"type": "bool", "default": False},
    "lock_seconds": {"type": "int", "default": 1800},
    "lock": {"type": "str", "default": ""},
    "digest": {"type": "str", "default": ""},
    "pins": {"type": "dict", "default": {}},
}


def present(module: AnsibleModule, venv: Venv) -> dict[str, object]:
    """Brings the environment about, unless it is there."""
    before = section(venv.stamp(), "packages")
    state, found = venv.look()
    changes, lacks_uv = state != "ready", ""
    if changes and not module.check_mode:
        if venv.wanted.uv:
            venv.build(state)
            found = venv.packages()
        else:
            changes, lacks_uv = False, os.uname().machine
    for warning in venv.warnings:
        module.warn(warning)
    packages = found["packages"] if found else {}
    after = packages or {name: versions[-1] for name, versions in venv.wanted.pins.items()}
    return {
        "changed": changes,
        "lacks_uv": lacks_uv,
        "packages": packages,
        "torch": packages.get("torch"),
        "torch_is_cpu_build": found["cuda"] is None if found and packages.get("torch") else None,
        "index": venv.index or venv.stamp().get("index"),
        "diff": {"before": listed(before), "after": listed(after)},
    }


def listed(packages: Mapping[str, object]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def absent(module: AnsibleModule, venv: Venv) -> dict[str, object]:
    """Removes the environment, and nothing that only has its path."""
    state = venv.place()
    if state in ("occupied", "foreign"):
        raise VenvError(
            f"{venv.wanted.host}: {venv.wanted.path} was not created by this collection, so it was not changed",
            "occupied",
        )
    before = section(venv.stamp(), "packages")
    if not module.check_mode:
        venv.remove()
    return {"changed": state != "absent", "packages": {}, "diff": {"before": listed(before), "after": ""}}


def wanted_of(given: Mapping[str, Any]) -> VenvSpec:
    """The wanted environment, from the module's options."""
    path = given["path"].rstrip("/")
    found = [one for one in (uv_beside(path), shutil.which("uv")) if one and os.access(one, os.X_OK)]
    return VenvSpec(
        host=given["host"] or platform.node(),
        path=path,
        python=given["python"] or sys.executable,
        uv=found[0] if found else "",
        wheels=given["wheels_dir"] or "",
        **{name: given[name] for name in ("digest", "pins", "lock", "torch_index", "offline")},
    )


def main() -> None:
    module = checked_module(
        argument_spec=ARGUMENTS,
        bounds={"lock_seconds": (0, 86400)},
        supports_check_mode=True,
        required_if=[("offline", True, ["wheels_dir"])],
    )
    wanted = wanted_of(module.params)
    venv = Venv(wanted)
    make = absent if module.params["state"] == "absent" else present
    tags: dict[str, str] | None = None
    try:
        if has_credentials(wanted.torch_index):
            raise VenvError(f"{wanted.host}: torch_index is {NO_CREDENTIALS}", "requirement")
        # An environment is removed also where no Python could make one.
        tags = venv.tags if make is present else None
        # Somebody else's environment is only read, and its folder may not be writable for a lock.
        if module.check_mode or venv.place() == "foreign":
            result = make(module, venv)
        else:
            with building(wanted.path, wanted.host, module.params["lock_seconds"]):
                result = make(module, venv)
    except VenvError as why:
        module.fail_json(msg=str(why), reason=why.reason, tags=tags)
    except OSError as why:
        message = f"{wanted.host}: {why.filename or wanted.path}: {why.strerror or why}"
        module.fail_json(msg=message, reason="folder", tags=tags)
    version = tags["python"] if tags else None
    module.exit_json(venv=wanted.path, python=venv.python, python_version=version, tags=tags, **result)


if __name__ == "__main__":
    main()
