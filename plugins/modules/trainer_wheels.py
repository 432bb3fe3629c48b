#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_wheels
short_description: Fetch on the controller the packages of hosts without a package index
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Downloads the wheels that the locks name for a Python and an architecture into a folder of the controller, from which
    M(nanochat.ddp.trainer_venv) installs them once they are on a host.
  - Runs on the controller, with the package indexes, folders of wheels, certificate and proxy that pip is configured with there.
options:
  dest:
    description: The folder on the controller.
    type: path
    required: true
  python:
    description: The Python of the hosts, such as V(3.11).
    type: str
    required: true
  machine:
    description: Their architecture, such as V(x86_64).
    type: str
    required: true
  src:
    description: The trainer's folder, which has the locks; by default this collection's.
    type: path
  packages:
    description: The locks, as in M(nanochat.ddp.trainer_venv).
    type: list
    elements: str
    default: [trainer]
  torch_index:
    description: As in M(nanochat.ddp.trainer_venv).
    type: str
    default: auto
extends_documentation_fragment:
  - nanochat.ddp.changer
  - ansible.builtin.action_common_attributes
attributes:
  action:
    description: It runs on the controller alone.
    support: full
  platform:
    platforms: posix
  diff_mode:
    description: Wheels are not shown.
    support: none
"""

EXAMPLES = r"""
- name: Fetch the packages once for the hosts that cannot reach an index
  nanochat.ddp.trainer_wheels:
    dest: ~/.cache/nanochat-ddp/wheels/3.11-x86_64
    python: "3.11"
    machine: x86_64
  run_once: true
"""

RETURN = r"""
# Nothing but whether anything was fetched.
"""

# There is an action plugin of this name, which does all the work.
