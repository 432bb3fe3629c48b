#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: judge
short_description: Decide once for all hosts of a job
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Runs on the controller and asks no host anything. It judges what the tasks of all hosts registered; use it with C(run_once).
  - Missing evidence of a host is an error, never "nothing found".
options:
  of:
    description:
      - V(settings) reads the variables C(ddp_*) of the hosts, refuses wrong ones and returns RV(controller).
      - V(questions) does the same and returns the options of M(nanochat.ddp.host_info) for each host.
      - V(plan) computes the one document that every later step of a job reads, from the settings and from the facts C(ddp_probe), which are
        what M(nanochat.ddp.host_info) returned. It holds the world, the rank of each host, addresses, ports and interfaces, threads and the
        batch, the counted parameters, and the exact command and environment of every rank. It refuses what cannot work before anything is
        touched, and names every problem at once.
      - V(setup) says, from what M(nanochat.ddp.setup_info) returned, which steps have nothing to bring to any host.
      - V(sameness) fails where hosts have different trainers, packages or data. Ranks of different versions would disagree, so all hosts need
        the same trainer files, the same torch, with the same Python the same packages, and the same shards with the same tokenizer.
      - V(preflight) makes findings of what was tried between the hosts, each with a stable code, its severity, what was seen, why it matters
        and what to do; predicts the speed of one host and of all where a training step and the links were measured; shows all this, and
        fails where a finding stands against a start.
      - V(launch) decides from what M(nanochat.ddp.run_info) returned whether the run is left alone or started. A run lives or ends as a whole.
      - V(verdict) names, from what M(nanochat.ddp.doctor_info) returned, why a run is stuck or died. A host that cannot be reached, one that
        did not answer in time and one on which collecting failed are distinguished.
    type: str
    choices: [settings, questions, plan, setup, sameness, launch, preflight, verdict]
    required: true
  hosts:
    description:
      - Names of the job's hosts in the order of the inventory. The first becomes the master unless C(ddp_rank) says otherwise.
      - Required with O(of=settings), O(of=questions), O(of=plan) and O(of=sameness).
    type: list
    elements: str
  tolerant:
    description:
      - Return what stands in the way of a start as findings, and take hosts without a probe. Enough to see a run and to stop it.
      - Invalid settings are still rejected. With O(of=questions) and O(of=plan).
    type: bool
    default: false
  plan:
    description: The plan. Required with O(of=setup), O(of=preflight), O(of=launch) and O(of=verdict).
    type: dict
  evidence:
    description:
      - For each host of the plan the registered result of the module that O(of) names, whatever became of the task there.
      - With O(of=preflight) what its tasks registered, by C(probe), C(firewall), C(answering), C(links), C(manifest), C(files), C(gloo),
        C(step) and C(measured), as far as it was tried. What is there of one host and missing of another one is an error.
      - Required with O(of=setup), O(of=preflight), O(of=launch) and O(of=verdict).
    type: dict
  files:
    description: For every host what M(nanochat.ddp.trainer_files) returned. With O(of=sameness).
    type: dict
  venv:
    description: For every host what M(nanochat.ddp.trainer_venv) returned. With O(of=sameness).
    type: dict
  data:
    description: For every host what M(nanochat.ddp.shard_folder) returned with the links of the run. With O(of=sameness).
    type: dict
  master:
    description: The host with which the others are compared; by default the first of O(hosts). With O(of=sameness).
    type: str
  probes:
    description: For every host what M(nanochat.ddp.host_info) returned as C(probe), where the evidence does not have it. With O(of=preflight).
    type: dict
    default: {}
  plan_findings:
    description: What the plan itself found. With O(of=preflight).
    type: list
    elements: dict
    default: []
  before_network:
    description:
      - Whether the step that opens the firewalls is still to come. Closed ports that it will open are then no error. With O(of=preflight).
    type: bool
    default: false
  rehearsal:
    description: Whether the trainer and the data are on the hosts by now and have to be the same. With O(of=preflight).
    type: bool
    default: false
  running:
    description: Whether the run is in progress, so that nothing was tried. With O(of=preflight).
    type: bool
    default: false
  strict:
    description: Fail for warnings, too. With O(of=preflight).
    type: bool
    default: false
  restart:
    description: Whether you asked for a restart. With O(of=launch).
    type: bool
    default: false
  fresh:
    description: Whether a start from step 0 was asked for. With O(of=launch).
    type: bool
    default: false
  stall_factor:
    description: A step may take this many times as long as usual. With O(of=verdict).
    type: float
    default: 5
  secrets:
    description: Dictionaries whose values are masked in O(file). With O(of=verdict).
    type: list
    elements: dict
    default: []
  measured:
    description:
      - For each host the measurements of a rehearsal of this job, which a second plan goes by (O(of=plan)). Without them the last ones count
        that the host kept, as C(ddp_probe) has them.
    type: dict
  show:
    description: What to print; by default V(none) with O(of=plan) and V(text) with O(of=preflight). V(budget) is only the table of the
      models that fit a budget.
    type: str
    choices: [text, json, none, budget]
  file:
    description:
      - File on the controller to keep as JSON the plan, its findings and its decisions (O(of=plan)), or findings, prediction and links
        (O(of=preflight)), or the verdict and all evidence, which only its owner may read (O(of=verdict)).
    type: path
attributes:
  check_mode:
    description: Can run in check mode and tell what it would do without doing it.
    support: full
    details: In check mode O(file) is written with O(of=verdict) only, where nothing else is.
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
  nanochat.ddp.judge:
    of: questions
    hosts: "{{ groups['trainers'] }}"
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

- name: Compute the plan
  nanochat.ddp.judge:
    of: plan
    hosts: "{{ groups['trainers'] }}"
    show: text
  register: planned
  run_once: true

- name: Check that all hosts have the same trainer
  nanochat.ddp.judge:
    of: sameness
    hosts: "{{ ansible_play_hosts }}"
    files: "{{ ansible_play_hosts | nanochat.ddp.of_hosts(hostvars, 'files') }}"
    venv: "{{ ansible_play_hosts | nanochat.ddp.of_hosts(hostvars, 'venv') }}"
  run_once: true

- name: Decide whether the run is started
  nanochat.ddp.judge:
    of: launch
    plan: "{{ planned.plan }}"
    evidence: "{{ ansible_play_hosts_all | nanochat.ddp.of_hosts(hostvars, 'before') }}"
  register: decided
  run_once: true
"""

RETURN = r"""
controller:
  description: Settings of what the controller itself does. They are no part of the plan and of its digest.
  returned: success and O(of=settings) or O(of=plan)
  type: dict
  sample: {watch: true, stall_factor: 5.0, results_dir: runs, collect_checkpoints: true, strict: false, fresh: false}
questions:
  description: For each host the options of M(nanochat.ddp.host_info).
  returned: success and O(of=questions)
  type: dict
  sample:
    desktop: {base_dir: /mnt/data/nanochat, run_dir: /mnt/data/nanochat/runs/d4, venv_dir: null, python: null, ports: [29500], peers: [laptop]}
plan:
  description: The plan. Its parts are described in docs/contract.md of the collection.
  returned: success and O(of=plan)
  type: dict
  sample:
    format: 1
    run: d4
    digest: 8a2be6bee2c64f67
    world: 2
    master: {host: desktop, address: 192.168.1.10, port: 29500}
ranks:
  description: The rank of each host, which is its place among the plan's nodes.
  returned: success and O(of=plan)
  type: dict
  sample: {desktop: 0, laptop: 1}
training:
  description: >-
    The training that a start is of, for M(nanochat.ddp.run_folder): its id, the number by which trainings of a run are ordered, when it was begun,
    and C(goes_on), the id in a folder that it resumes (null where it begins, empty where no id is known).
  returned: success and O(of=plan)
  type: dict
  sample: {id: 3f9c2a7be1d04c55, number: 2, begun: 1795478400, goes_on: 3f9c2a7be1d04c55, base: null}
so_far:
  description: Whether the run is in progress on any host, and whether this very plan has been carried out on all.
  returned: success and O(of=plan)
  type: dict
  sample: {running: false, done: false}
problems:
  description: What stands in the way, as findings.
  returned: failure and O(of=settings), O(of=questions) or O(of=plan)
  type: list
  elements: dict
  sample: [{code: setting-refused, severity: error, host: '', peer: null, seen: ddp_depth is "x" on every host; it must be an integer of at least 1}]
trainer:
  description: Whether every host has the trainer's files and packages, the same as all others.
  returned: success and O(of=setup)
  type: bool
data:
  description: Whether every host has the whole data set, the same as all others, and the run reads exactly that.
  returned: success and O(of=setup)
  type: bool
run:
  description: Name of the run.
  returned: O(of=preflight)
  type: str
  sample: d4
decided:
  description: >-
    For each value that the settings may leave open its C(value), who decided it in C(by) (V(user), V(profile), V(default), V(stage), V(trainer),
    V(hosts), V(measured) or V(resumed run)), and C(why) where that is not plain.
  returned: success and O(of=plan)
  type: dict
  sample: {sync: {value: int8, by: measured, why: ''}, iterations: {value: 100, by: user, why: ''}}
findings:
  description: What is worth knowing about the plan, or what was tried, errors first.
  returned: O(of=plan) or O(of=preflight)
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
  returned: O(of=preflight)
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
  returned: O(of=preflight)
  type: list
  elements: dict
  sample: [{host: desktop, peer: laptop, nic: enp4s0, latency_ms: 0.21, bandwidth_mbit: 941.0, duplex_mbit: 935.0, mtu: 1500, clock_offset: 0.002}]
decision:
  description: V(start) or V(keep).
  returned: success and O(of=launch)
  type: str
  sample: start
reason:
  description: Why.
  returned: success and O(of=launch)
  type: str
  sample: the plan is new on at least one host
verdict:
  description: The one finding about a run.
  returned: success and O(of=verdict)
  type: dict
  sample: {code: rank-frozen, severity: error, host: laptop, seen: rank 1 (laptop) is stopped (process 4711 is in state T)., remedy: ''}
evidence:
  description: The lines that the verdict rests on.
  returned: success and O(of=verdict)
  type: list
  elements: str
text:
  description: The plan, or the verdict with its evidence, for people.
  returned: success and O(of=plan) or O(of=verdict)
  type: str
msg:
  description: What stands against it, or which hosts differ and in what.
  returned: failure
  type: str
"""

# The work is done by the action plugin of the same name, on the controller.
