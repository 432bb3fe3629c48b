#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: diagnose
short_description: Judge from the evidence of all ranks why a run is stuck or died
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Gives one verdict over what M(nanochat.ddp.doctor_info) returned on every host of a run. It runs on the controller and asks no host.
  - A host that cannot be reached, one that did not answer in time and one on which gathering failed are told apart.
options:
  plan:
    description: The plan that was deployed.
    type: dict
    required: true
  evidence:
    description:
      - For each host of the plan the registered result of M(nanochat.ddp.doctor_info), whatever became of the task there.
      - A host of the plan that is missing here is an error.
    type: dict
    required: true
  stall_factor:
    description: A step may take this many usual steps.
    type: float
    default: 5
  secrets:
    description: Dictionaries whose values are masked in O(file).
    type: list
    elements: dict
    default: []
  file:
    description: File on the controller for the verdict and all evidence, as JSON. Only its owner may read it.
    type: path
attributes:
  check_mode:
    description: Can run in check mode and tell what it would do without doing it.
    support: full
    details: The file is written in check mode, too, since nothing else is.
  diff_mode:
    description: Returns what was changed in diff mode.
    support: none
  idempotent:
    description: Running it again changes nothing.
    support: full
seealso:
  - module: nanochat.ddp.doctor_info
"""

EXAMPLES = r"""
- name: Name the cause
  nanochat.ddp.diagnose:
    plan: "{{ ddp_plan }}"
    evidence: "{{ dict(ansible_play_hosts_all | zip(ansible_play_hosts_all | map('extract', hostvars, 'seen'))) }}"
  register: diagnosed
  run_once: true
"""

RETURN = r"""
verdict:
  description: The one finding.
  returned: success
  type: dict
  sample: {code: rank-frozen, severity: error, host: laptop, seen: rank 1 (laptop) is stopped (process 4711 is in state T)., remedy: ''}
evidence:
  description: The lines that it rests on.
  returned: success
  type: list
  elements: str
text:
  description: Both for people.
  returned: success
  type: str
"""

# There is an action plugin of this name, which does all the work.
