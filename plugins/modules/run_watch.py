#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_watch
short_description: Poll a running training and decide whether watching is over
version_added: 0.1.0
description:
  - Polls a host's share of a run once, for an C(until) loop. It waits for news, shares results with the loops of the other hosts, and
    reports when the run ended, crashed or is stuck.
  - After a broken connection it tries the host again for O(lost_after) seconds.
  - Polls every three seconds at first and every twenty in a long run, so that watching does not slow the training.
extends_documentation_fragment:
  - nanochat.ddp.reader
  - nanochat.ddp.reader.looks
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  nodes:
    description:
      - All hosts of the run, each with C(host) (as the inventory names it), C(run_dir) and C(rank), such as the nodes of the plan.
      - Hosts beyond Ansible's C(forks) are polled too.
    type: list
    elements: dict
    required: true
  first_step:
    description: Whether watching ends after the first step.
    type: bool
    default: false
  stall_minimum:
    description: A run counts as stalled only after this many seconds without progress or CPU use.
    type: float
    default: 45
  timeout:
    description: Timeout in seconds for the start of the run, and for a step of a rank that uses CPU; three times as long for evaluating and saving.
    type: float
    default: 300
  lost_after:
    description: Seconds after which a host that does not answer is given up.
    type: float
    default: 600
attributes:
  action:
    description: It runs on the controller and looks at the host through M(nanochat.ddp.run_info).
    support: full
seealso:
  - module: nanochat.ddp.run_info
"""

EXAMPLES = r"""
- name: Watch the run to its end
  nanochat.ddp.run_watch:
    nodes:
      - host: node1
        run_dir: /mnt/data/nanochat/runs/d4
      - host: node2
        run_dir: /home/me/nanochat/runs/d4
  register: watched
  until: watched.over
  retries: 1000000
  delay: 0
"""

RETURN = r"""
run:
  description: State of the run, as M(nanochat.ddp.run_info) returns it.
  returned: always
  type: dict
over:
  description: Whether watching this host is over.
  returned: always
  type: bool
verdict:
  description: >-
    Why: V(finished), V(stopped), V(crashed), V(stalled) (no rank makes progress), V(orphaned) (runs on while another rank crashed), V(lost)
    (did not answer), V(missing) (nothing was started), V(away) (the run finished, or started, without this host) or V(started) (with
    O(first_step)).
  returned: when watching is over
  type: str
sentence:
  description: The verdict in words.
  returned: when watching is over
  type: str
reachable:
  description: Whether the host answered.
  returned: always
  type: bool
others:
  description: States of the hosts beyond C(forks) that this host's process polls.
  returned: when watching is not over
  type: dict
"""

# There is an action plugin of this name, which does all the work.
