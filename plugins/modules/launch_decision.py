#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done by the action plugin of the same name, on the controller.
from __future__ import annotations

DOCUMENTATION = r"""
module: launch_decision
short_description: Decide once for all hosts whether a run is left alone or started
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - A run lives or ends as a whole, so one decision is made from the states of all its nodes.
extends_documentation_fragment:
  - nanochat.ddp.reader
options:
  plan:
    description: The plan that is to run.
    type: dict
    required: true
  evidence:
    description: For every host of the plan what M(nanochat.ddp.run_info) returned. That there is none of a host is an error.
    type: dict
    required: true
  restart:
    description: Whether a restart was asked for.
    type: bool
    default: false
  fresh:
    description: Whether a start from step 0 was asked for.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Find what runs
  nanochat.ddp.run_info:
    run_dir: "{{ ddp_node.run_dir }}"
  register: before

- name: Decide what to do
  nanochat.ddp.launch_decision:
    plan: "{{ ddp_plan }}"
    evidence: "{{ dict(ansible_play_hosts_all | zip(ansible_play_hosts_all | map('extract', hostvars, 'before'))) }}"
  register: decided
  run_once: true
"""

RETURN = r"""
decision:
  description: V(start) or V(keep).
  returned: success
  type: str
  sample: start
reason:
  description: Why.
  returned: success
  type: str
  sample: the plan is new on at least one host
"""
