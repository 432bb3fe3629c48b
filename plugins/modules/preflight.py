#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Judge what was tried between the hosts of a job before it starts
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - The last step of the role preflight. It judges, once and on the controller, what the role's other tasks registered on every host,
    and makes findings of it, each with a stable code, its severity, what was seen, why it matters and what to do.
  - Predicts the speed of one host and of all where a training step and the links were measured.
  - Shows the findings, and fails if one of them stands against a start.
options:
  plan:
    description: The plan.
    type: dict
    required: true
  evidence:
    description:
      - For each host of the plan what its tasks registered, by C(probe), C(firewall), C(answering), C(links), C(manifest), C(files), C(gloo),
        C(step) and C(measured), as far as it was tried.
      - What is there of one host and missing of another one is an error.
    type: dict
    required: true
  probes:
    description: For every host what M(nanochat.ddp.host_info) returned as C(probe), where the evidence does not have it.
    type: dict
    default: {}
  plan_findings:
    description: What the plan itself found.
    type: list
    elements: dict
    default: []
  before_network:
    description: Whether the step that opens the firewalls is still to come. Closed ports that it will open are then no error.
    type: bool
    default: false
  rehearsal:
    description: Whether the trainer and the data are on the hosts by now and have to be the same.
    type: bool
    default: false
  running:
    description: Whether the run is in progress, so that nothing was tried.
    type: bool
    default: false
  strict:
    description: Fail for warnings, too.
    type: bool
    default: false
  show:
    description: What to print.
    type: str
    choices: [text, json, none]
    default: text
  file:
    description: File on the controller to keep findings, prediction and links in, as JSON.
    type: path
attributes:
  check_mode:
    description: Can run in check mode and tell what it would do without doing it.
    support: full
    details: In check mode O(file) is not written.
  diff_mode:
    description: Returns what was changed in diff mode.
    support: none
  idempotent:
    description: Running it again changes nothing.
    support: full
seealso:
  - module: nanochat.ddp.peer_check
  - module: nanochat.ddp.peer_firewall
"""

EXAMPLES = r"""
- name: Evaluate the findings
  nanochat.ddp.preflight:
    plan: "{{ ddp_plan }}"
    evidence: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'tried'))) }}"
    plan_findings: "{{ ddp_plan_findings }}"
  register: judged
  run_once: true
"""

RETURN = r"""
run:
  description: Name of the run.
  returned: always
  type: str
  sample: d4
findings:
  description: What was found, errors first.
  returned: always
  type: list
  elements: dict
  sample:
    - code: port-blocked
      severity: error
      host: laptop
      peer: desktop
      seen: desktop cannot connect to laptop (192.168.1.11) on port 32768, 60999, no answer (dropped); ufw blocks on laptop
      why: Ranks connect to each other on the rendezvous port and on any port of the data range, in both directions.
      remedy: "On laptop: sudo ufw prepend allow from 192.168.1.10 to any port 32768:60999 proto tcp comment nanochat.ddp:d4"
prediction:
  description: Expected speeds, waits and time, C(null) where something was not measured.
  returned: always
  type: dict
  sample:
    one_host: desktop
    one_host_tokens_per_second: 2510.0
    tokens_per_second: 4320.5
    step_seconds: 0.474
    wait_seconds: {desktop: 0.1, laptop: 0.02}
    bytes_sent: 47000000
    eta_seconds: 2370.0
    gain: 1.72
links:
  description: Every measured direction between two hosts.
  returned: always
  type: list
  elements: dict
  sample: [{host: desktop, peer: laptop, nic: enp4s0, latency_ms: 0.21, bandwidth_mbit: 941.0, duplex_mbit: 935.0, mtu: 1500, clock_offset: 0.002}]
"""
