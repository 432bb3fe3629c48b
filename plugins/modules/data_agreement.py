#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# The work is done by the action plugin of the same name, on the controller.
from __future__ import annotations

DOCUMENTATION = r"""
module: data_agreement
short_description: Refuse hosts whose runs would read different files
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - All ranks train on the same shards with the same tokenizer, so the digests of what their runs read have to be equal.
extends_documentation_fragment:
  - nanochat.ddp.reader
options:
  hosts:
    description: The hosts to compare.
    type: list
    elements: str
    required: true
  master:
    description: The host that made or fetched the data set, with which the others are compared.
    type: str
    required: true
  evidence:
    description: For every host what M(nanochat.ddp.shard_links) returned. That there is none of a host is an error.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Check that every host reads the same files
  nanochat.ddp.data_agreement:
    hosts: "{{ ansible_play_hosts }}"
    master: "{{ ddp_plan.master.host }}"
    evidence: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'linked'))) }}"
  run_once: true
"""

RETURN = r"""
msg:
  description: Which hosts differ.
  returned: failure
  type: str
"""
