#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done by the action plugin of the same name, on the controller.
from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_agreement
short_description: Refuse hosts that have different trainers or packages
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Ranks of different versions would disagree, so all hosts need the same trainer files, the same torch and, with the same
    Python, the same packages.
extends_documentation_fragment:
  - nanochat.ddp.reader
options:
  hosts:
    description: The hosts to compare; all with the first of them.
    type: list
    elements: str
    required: true
  files:
    description: For every host what M(nanochat.ddp.trainer_files) returned. That there is nothing of a host is an error.
    type: dict
    required: true
  venvs:
    description: For every host what M(nanochat.ddp.trainer_venv) returned. That there is nothing of a host is an error.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Check that all hosts have the same trainer
  nanochat.ddp.trainer_agreement:
    hosts: "{{ ansible_play_hosts }}"
    files: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'files'))) }}"
    venvs: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'venv'))) }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: Which hosts differ, and in what.
  returned: failure
  type: str
"""
