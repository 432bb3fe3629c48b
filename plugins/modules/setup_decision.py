#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done by the action plugin of the same name, on the controller.
from __future__ import annotations

DOCUMENTATION = r"""
module: setup_decision
short_description: Decide once for all hosts whether trainer and data are there already
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - A step is left out only where no host lacks anything of it and all hosts have the same.
extends_documentation_fragment:
  - nanochat.ddp.reader
options:
  plan:
    description: The plan.
    type: dict
    required: true
  evidence:
    description: For every host of the plan what M(nanochat.ddp.setup_info) returned. That there is none of a host is an error.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: See whether anything is to be brought
  nanochat.ddp.setup_decision:
    plan: "{{ ddp_plan }}"
    evidence: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'there'))) }}"
  register: setup
  run_once: true
"""

RETURN = r"""
trainer:
  description: Whether every host has the trainer's files and packages, the same as all others.
  returned: success
  type: bool
data:
  description: Whether every host has the whole data set, the same as all others, and the run reads exactly that.
  returned: success
  type: bool
"""
