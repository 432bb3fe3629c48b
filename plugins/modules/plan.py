#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Work out the plan of a distributed training job
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Computes, once and on the controller, the one document that every later step of a job reads. It holds the world, the rank
    of each host, addresses, ports and interfaces, threads and the batch, the counted parameters, and the exact command and
    environment of every rank.
  - Reads the variables C(ddp_*) of the hosts, and their facts C(ddp_probe) as M(nanochat.ddp.host_info) returns them.
  - Refuses what cannot work before anything is touched, and names every problem at once.
options:
  hosts:
    description: Names of the job's hosts in the order of the inventory. The first becomes the master unless C(ddp_rank) says otherwise.
    type: list
    elements: str
    required: true
  stage:
    description:
      - With V(settings), only the settings are read, wrong ones are refused, and RV(controller) is returned.
      - With V(questions), only the settings are read, wrong ones are refused, and the options of M(nanochat.ddp.host_info) for each
        host are returned. No host has been asked anything by then.
    type: str
    choices: [settings, questions, plan]
    default: plan
  tolerant:
    description:
      - Return what stands in the way of a start as findings, and take hosts without a probe. Enough to see a run and to stop it.
      - Wrong settings are refused all the same.
    type: bool
    default: false
  show:
    description: What to print.
    type: str
    choices: [text, json, none]
    default: none
  file:
    description: File on the controller to keep the plan and its findings in, as JSON.
    type: path
attributes:
  check_mode:
    description: Can run in check mode and tell what it would do without doing it.
    support: full
  diff_mode:
    description: Returns what was changed in diff mode.
    support: none
  idempotent:
    description: Running it again changes nothing.
    support: full
    details: The same settings and hosts give the same plan, digest and all.
"""

EXAMPLES = r"""
- name: Read the settings
  nanochat.ddp.plan:
    hosts: "{{ groups['trainers'] }}"
    stage: questions
  register: read
  run_once: true

- name: Look at every host
  nanochat.ddp.host_info:
    base_dir: "{{ read.questions[inventory_hostname].base_dir }}"
    peers: "{{ read.questions[inventory_hostname].peers }}"
  register: looked

- name: Keep what was seen
  ansible.builtin.set_fact:
    ddp_probe: "{{ looked.probe }}"

- name: Work out the plan
  nanochat.ddp.plan:
    hosts: "{{ groups['trainers'] }}"
    show: text
  register: planned
  run_once: true

- name: Show the command of rank 0
  ansible.builtin.debug:
    msg: "{{ planned.plan.nodes[0].argv }}"
  run_once: true
"""

RETURN = r"""
questions:
  description: For each host the options of M(nanochat.ddp.host_info).
  returned: success and O(stage=questions)
  type: dict
  sample:
    desktop: {base_dir: /mnt/data/nanochat, run_dir: /mnt/data/nanochat/runs/d4, venv_dir: null, python: null, ports: [29500], peers: [laptop]}
plan:
  description: The plan. Its parts are described in docs/architecture.md of the collection.
  returned: success and O(stage=plan)
  type: dict
  sample:
    format: 1
    run: d4
    digest: 8a2be6bee2c64f67
    world: 2
    master: {host: desktop, address: 192.168.1.10, port: 29500}
ranks:
  description: The rank of each host, which is its place among the plan's nodes.
  returned: success and O(stage=plan)
  type: dict
  sample: {desktop: 0, laptop: 1}
findings:
  description: What is worth knowing about the plan, and with O(tolerant) what stands in its way.
  returned: success and O(stage=plan)
  type: list
  elements: dict
  sample: [{code: nic-wifi, severity: warning, host: laptop, peer: null, seen: wlp3s0 is a Wi-Fi interface, why: '', remedy: ''}]
controller:
  description: Settings of what the controller itself does. They are no part of the plan and of its digest.
  returned: success
  type: dict
  sample: {watch: true, stall_factor: 5.0, results_dir: runs, collect_checkpoints: true, strict: false, fresh: false}
training:
  description: >-
    The training that a start is of, for M(nanochat.ddp.run_folder): its id, the number by which trainings of a run are ordered, when it was begun,
    and C(goes_on), the id that a folder holds which it goes on from (null where it begins, empty where no id is known).
  returned: success and O(stage=plan)
  type: dict
  sample: {id: 3f9c2a7be1d04c55, number: 2, begun: 1795478400, goes_on: 3f9c2a7be1d04c55, base: null}
text:
  description: The plan for people.
  returned: success
  type: str
  sample: Run d4 on 2 hosts (plan 8a2be6bee2c64f67)
problems:
  description: What stands in the way, as findings.
  returned: failure
  type: list
  elements: dict
  sample: [{code: setting-refused, severity: error, host: '', peer: null, seen: ddp_depth is "x" on every host; it must be an integer of at least 1}]
"""
