#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: setup_info
short_description: Check what a host still needs for a run
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Says whether a host has the trainer's files, its Python packages and the data set of a run, by the same rules as
    M(nanochat.ddp.trainer_files), M(nanochat.ddp.trainer_venv) and M(nanochat.ddp.shard_sync), in one step.
  - Unreadable items count as missing; the module that installs them reports the problem.
extends_documentation_fragment:
  - nanochat.ddp.reader
options:
  host:
    description: Name of this host in messages.
    type: str
  packages:
    description: The locks of the environment, as in M(nanochat.ddp.trainer_venv).
    type: list
    elements: str
    default: [trainer]
  python:
    description: The interpreter that the environment is made with; by default the one that runs the module.
    type: str
  torch_index:
    description: As in M(nanochat.ddp.trainer_venv).
    type: str
    default: auto
  digest:
    description: The digest of the locks; filled in from O(src).
    type: str
    default: ''
  pins:
    description: The packages of the locks that are checked, with their versions; filled in from O(src).
    type: dict
    default: {}
  src:
    description: The folder of the trainer on the controller.
    type: path
    required: true
  dest:
    description: The folder of the trainer on the host.
    type: path
    required: true
  files:
    description: SHA-256 digests of the files by path; filled in from O(src).
    type: dict
    default: {}
  venv_dir:
    description: The folder of the environment.
    type: path
    required: true
  data_dir:
    description: The folder of the data set.
    type: path
    required: true
  run_dir:
    description: The run folder, which should link exactly the files of the data set.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Check what the host already has
  nanochat.ddp.setup_info:
    src: "{{ playbook_dir }}/../trainer"
    dest: /home/xiaoxin/nanochat/trainer
    venv_dir: /home/xiaoxin/nanochat/venv
    data_dir: /home/xiaoxin/nanochat/data/books
    run_dir: /home/xiaoxin/nanochat/runs/d4
  register: there
"""

RETURN = r"""
files:
  description: Whether all trainer files are up to date, and their digest.
  returned: success
  type: dict
  sample: {ready: true, digest: 0f343b0931126a20}
venv:
  description: Whether the environment is complete, and its contents if so.
  returned: success
  type: dict
  sample: {ready: true, venv: /home/xiaoxin/nanochat/venv, python_version: '3.11', torch: 2.13.0+cpu, packages: {torch: 2.13.0+cpu}}
data:
  description: Whether all files match the manifest and are linked into the run, and the manifest's digest.
  returned: success
  type: dict
  sample: {ready: true, digest: 0f343b0931126a20}
"""

from ..module_utils._kit.arguments import checked_module
from ..module_utils._preflight.setup_look import OPTIONS, setup_seen


def main() -> None:
    module = checked_module(argument_spec=OPTIONS, supports_check_mode=True)
    module.exit_json(changed=False, **setup_seen(module.params))


if __name__ == "__main__":
    main()
