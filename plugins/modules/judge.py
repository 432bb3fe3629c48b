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
  - Runs on the controller without contacting a host. It judges the registered results of all hosts' tasks; use it with C(run_once).
  - Missing evidence of a host is an error, never "nothing found".
options:
  of:
    description:
      - V(settings) reads the hosts' variables C(ddp_*), rejects invalid ones and returns RV(controller).
      - V(questions) does the same and returns the options of M(nanochat.ddp.host_info) for each host.
      - V(plan) computes the document that every later step of a job reads, from the settings and from the facts C(ddp_probe), the results
        of M(nanochat.ddp.host_info). It contains the world, the rank of each host, addresses, ports and interfaces, threads and the
        batch, the counted parameters, and the exact command and environment of every rank. It rejects what cannot work before anything is
        changed, and names every problem at once.
      - V(setup) tells from the results of M(nanochat.ddp.setup_info) which steps have nothing to copy to any host.
      - V(sameness) fails where hosts have different trainers, packages or data. Ranks of different versions would disagree, so all hosts need
        the same trainer files, the same torch, with the same Python the same packages, and the same shards with the same tokenizer.
      - V(preflight) turns the tests between the hosts into findings, each with a stable code, its severity, what was seen, why it matters
        and what to do; predicts the speed of one host and of all if a training step and the links were measured; prints all this, and
        fails if a finding prevents a start.
      - V(launch) decides from the results of M(nanochat.ddp.run_info) whether to start the run or leave it alone. A run lives or ends as a whole.
      - V(verdict) names the reason why a run is stuck or died, from the results of M(nanochat.ddp.doctor_info). It distinguishes hosts that
        cannot be reached, did not answer in time, or failed to collect evidence.
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
      - Return the problems that prevent a start as findings, and accept hosts without a probe. This is enough to see a run and to stop it.
      - Invalid settings are still rejected. With O(of=questions) and O(of=plan).
    type: bool
    default: false
  plan:
    description: The plan. Required with O(of=setup), O(of=preflight), O(of=launch) and O(of=verdict).
    type: dict
  evidence:
    description:
      - For each host of the plan the registered result of the module that O(of) names, even if the task failed there.
      - With O(of=preflight) the registered results of its tasks as C(probe), C(firewall), C(answering), C(links), C(manifest), C(files),
        C(gloo), C(step) and C(measured), if they ran. A result that one host has and another lacks is an error.
      - Required with O(of=setup), O(of=preflight), O(of=launch) and O(of=verdict).
    type: dict
  files:
    description: The result of M(nanochat.ddp.trainer_files) on every host. With O(of=sameness).
    type: dict
  venv:
    description: The result of M(nanochat.ddp.trainer_venv) on every host. With O(of=sameness).
    type: dict
  data:
    description: The result of M(nanochat.ddp.shard_sync) for the run's links on every host. With O(of=sameness).
    type: dict
  master:
    description: The host with which the others are compared; by default the first of O(hosts). With O(of=sameness).
    type: str
  probes:
    description: The C(probe) of M(nanochat.ddp.host_info) for every host whose evidence lacks it. With O(of=preflight).
    type: dict
    default: {}
  plan_findings:
    description: The findings of the plan. With O(of=preflight).
    type: list
    elements: dict
    default: []
  before_network:
    description:
      - Whether a later step opens the firewalls. Closed ports that it will open are then not an error. With O(of=preflight).
    type: bool
    default: false
  rehearsal:
    description: Whether the hosts already have the trainer and the data, which must then be the same. With O(of=preflight).
    type: bool
    default: false
  running:
    description: Whether the run is in progress, so that nothing was tested. With O(of=preflight).
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
  secrets:
    description: Dictionaries whose values are masked in O(file). With O(of=verdict).
    type: list
    elements: dict
    default: []
  measured:
    description:
      - For each host the measurements of this job's rehearsal, for a second plan (O(of=plan)). Without them the last ones that the host
        stored count, from C(ddp_probe).
    type: dict
  show:
    description: What to print; by default V(none) with O(of=plan) and V(text) with O(of=preflight). V(whole) also has the command that
      starts a rank by hand, V(budget) is only the table of the models within a budget.
    type: str
    choices: [text, whole, json, none, budget]
  file:
    description:
      - File on the controller to store as JSON the plan, its findings and its decisions (O(of=plan)), or findings, prediction and links
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
  description: Settings of the controller itself. They are not part of the plan and its digest.
  returned: success and O(of=settings) or O(of=plan)
  type: dict
  sample: {watch: true, results_dir: runs, fresh: false}
questions:
  description: For each host the options of M(nanochat.ddp.host_info).
  returned: success and O(of=questions)
  type: dict
  sample:
    desktop: {base_dir: /mnt/data/nanochat, run_dir: /mnt/data/nanochat/runs/d4, venv_dir: null, python: null, ports: [29500], peers: [laptop]}
plan:
  description: The plan. Its types are in C(module_utils/_contract/plan.py).
  returned: success and O(of=plan)
  type: dict
  sample:
    format: 1
    run: d4
    digest: 8a2be6bee2c64f67
    world: 2
    master: {host: desktop, address: 192.168.1.10, port: 29500}
ranks:
  description: The rank of each host, its index in the plan's nodes.
  returned: success and O(of=plan)
  type: dict
  sample: {desktop: 0, laptop: 1}
training:
  description: >-
    The training that a start belongs to, for M(nanochat.ddp.run_folder): its id, its number among the run's trainings, when it began,
    and C(goes_on), the id in a folder that it resumes (null if it begins, empty if no id is known).
  returned: success and O(of=plan)
  type: dict
  sample: {id: 3f9c2a7be1d04c55, number: 2, begun: 1795478400, goes_on: 3f9c2a7be1d04c55, base: null}
so_far:
  description: Whether the run is in progress on any host, and whether this plan is done on all of them.
  returned: success and O(of=plan)
  type: dict
  sample: {running: false, done: false}
problems:
  description: The problems that prevent a plan, as findings.
  returned: failure and O(of=settings), O(of=questions) or O(of=plan)
  type: list
  elements: dict
  sample: [{code: setting-refused, severity: error, host: '', peer: null, seen: ddp_depth is "x" on every host; it must be an integer of at least 1}]
trainer:
  description: Whether every host has the trainer's files and packages, the same on all.
  returned: success and O(of=setup)
  type: bool
data:
  description: Whether every host has the whole data set, the same on all, and the run reads exactly that.
  returned: success and O(of=setup)
  type: bool
run:
  description: Name of the run.
  returned: O(of=preflight)
  type: str
  sample: d4
decided:
  description: >-
    For each value that the settings may leave open its C(value), its source in C(by) (V(user), V(profile), V(default), V(stage), V(trainer),
    V(hosts), V(measured) or V(resumed run)), and C(why) if that is not obvious.
  returned: success and O(of=plan)
  type: dict
  sample: {sync: {value: int8, by: measured, why: ''}, iterations: {value: 100, by: user, why: ''}}
findings:
  description: Findings about the plan or the tests, errors first.
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
  sample: [{host: desktop, peer: laptop, nic: enp4s0, latency_ms: 0.21, bandwidth_mbit: 941.0, duplex_mbit: 935.0, mtu: 1500}]
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
  description: The lines that support the verdict.
  returned: success and O(of=verdict)
  type: list
  elements: str
text:
  description: The plan, or the verdict with its evidence, for people.
  returned: success and O(of=plan) or O(of=verdict)
  type: str
msg:
  description: The problems, or which hosts differ and in what.
  returned: failure
  type: str
"""

# The work is done by the action plugin of the same name, on the controller.
