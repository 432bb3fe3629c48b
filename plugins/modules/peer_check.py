#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
---
module: peer_check
short_description: Test connectivity between a job's hosts on the addresses and ports it will use
version_added: 0.1.0
description:
  - Used in three steps on all hosts at once. V(listening) starts a short-lived process that answers on the host's own
    address, V(checked) connects to those of all other hosts, V(stopped) ends the process.
  - Every port of every peer is tried, then round trips, then a short stream of full-size packets that may not be cut
    into pieces.
  - A port that cannot be reached is a result and not a failure.
  - Changes nothing and leaves nothing behind; the process ends by itself at its deadline, and only that very process is
    ever signalled. Works without root.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  state:
    description:
      - Which of the three steps to take.
    type: str
    choices: [listening, checked, stopped]
    required: true
  address:
    description:
      - The host's own address in the job. The process listens only there, and connections are made from there.
    type: str
  rendezvous_port:
    description:
      - With O(state=listening), the port on which the master will wait for all others. V(0) on hosts that are not the
        master.
      - If somebody holds it, RV(holders) names them.
    type: int
    default: 0
  data_ports:
    description:
      - With O(state=listening), the range in which the hosts will open connections for data.
      - Both ends of it and some ports between them are tried.
    type: str
    default: 32768-60999
  count:
    description:
      - With O(state=listening), how many data ports are opened.
    type: int
    default: 3
  deadline:
    description:
      - With O(state=listening), seconds after which the process ends by itself.
    type: int
    default: 120
  peers:
    description:
      - With O(state=checked), the RV(responder) of every other host, in the order in which rates are measured.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description:
          - Where that host answers.
        type: str
        required: true
      ports:
        description:
          - On which ports.
        type: list
        elements: int
        required: true
      token:
        description:
          - The word by which its process knows us.
        type: str
        required: true
      pid:
        description:
          - Not used; it is there so that a RV(responder) can be given as it is.
        type: int
      started:
        description:
          - Not used either.
        type: int
  timeout:
    description:
      - With O(state=checked), seconds to wait for a connection before it counts as dropped.
    type: float
    default: 3.0
  bandwidth_seconds:
    description:
      - With O(state=checked), how long each rate is measured at most.
    type: float
    default: 0.5
  bandwidth_bytes:
    description:
      - With O(state=checked), how many bytes are sent for it at most.
    type: int
    default: 16777216
  responder:
    description:
      - With O(state=stopped), the RV(responder) of this host. Without it there is nothing to stop.
    type: dict
    suboptions:
      pid:
        description:
          - Its process.
        type: int
        required: true
      started:
        description:
          - The clock tick at which that process started, so that no other one with its number is hit.
        type: int
        required: true
      address:
        description:
          - Not used; it is there so that a RV(responder) can be given as it is.
        type: str
      ports:
        description:
          - Not used either.
        type: list
        elements: int
      token:
        description:
          - Not used either.
        type: str
attributes:
  check_mode:
    description: Can run in check_mode and return changed status prediction without modifying target.
    support: full
    details:
      - Does the same as without it, since nothing is changed.
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: none
  idempotent:
    description:
      - When run twice in a row outside check mode, with the same arguments, the second invocation indicates no change.
    support: full
seealso:
  - module: nanochat.ddp.peer_firewall
"""

EXAMPLES = r"""
- name: Answer the others for a moment
  nanochat.ddp.peer_check:
    state: listening
    address: 192.168.1.10
    rendezvous_port: 29500
    data_ports: 32768-60999
  register: answering

- name: Try to reach the others
  nanochat.ddp.peer_check:
    state: checked
    address: 192.168.1.10
    peers:
      - address: 192.168.1.11
        ports: [32768, 41000, 60999]
        token: 5f2c9d0e5f2c9d0e5f2c9d0e5f2c9d0e
  register: links

- name: Answer no longer
  nanochat.ddp.peer_check:
    state: stopped
    responder: "{{ answering.responder }}"
"""

RETURN = r"""
responder:
  description: What the peers and the last step need; empty if nothing could be started.
  type: dict
  returned: with O(state=listening)
  contains:
    address:
      description: Where it listens.
      type: str
    ports:
      description: On which ports.
      type: list
      elements: int
    token:
      description: The word that a peer has to say.
      type: str
    pid:
      description: Its process.
      type: int
    started:
      description: The clock tick at which it started.
      type: int
holders:
  description: Who holds the rendezvous port, each with port, address, user, pid, command and marker.
  type: list
  elements: dict
  returned: with O(state=listening)
error:
  description: Why nothing could be started, for instance that the address is not on this host.
  type: str
  returned: with O(state=listening)
links:
  description: One entry for every peer, in the same order.
  type: list
  elements: dict
  returned: with O(state=checked)
  contains:
    address:
      description: The peer.
      type: str
    ports:
      description:
        - One entry for every port, with C(port), C(reachable), C(milliseconds), C(words) of the system and C(error).
        - C(error) is empty or one of V(dropped) (no answer in time), V(refused), V(unreachable), V(no-route),
          V(no-address), V(forbidden), V(reset), V(stranger) (the way is open, but another program answers) and V(failed).
      type: list
      elements: dict
    latency_ms:
      description: The middle one of some round trips.
      type: float
    clock_offset:
      description: Seconds by which the peer's clock is ahead of ours.
      type: float
    bandwidth_mbit:
      description: The rate towards the peer, as the peer saw it.
      type: float
    duplex_mbit:
      description: The rate from the peer while as much was sent to it; about half of the other where both share the air.
      type: float
    mtu:
      description: The largest packet on this way as the kernel knows it.
      type: int
    full_size:
      description: Whether packets of that size arrive; null if it could not be tried.
      type: bool
    passing_size:
      description: If they do not, a size that does.
      type: int
    nic:
      description: The interface that carries the way.
      type: str
    gateway:
      description: The router on the way, if there is one.
      type: str
    error:
      description: What went wrong in the measurements.
      type: str
stopped:
  description: Whether a process was ended.
  type: bool
  returned: with O(state=stopped)
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import FirewallError, port_range
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.commands import runner
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.peer_check import Limits, Peer, check
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.peer_responder import (
    Ask,
    PeerCheckError,
    start,
    stop,
)

ARGUMENTS: dict[str, Any] = {
    "state": {"type": "str", "choices": ["listening", "checked", "stopped"], "required": True},
    "address": {"type": "str"},
    "rendezvous_port": {"type": "int", "default": 0},
    "data_ports": {"type": "str", "default": "32768-60999"},
    "count": {"type": "int", "default": 3},
    "deadline": {"type": "int", "default": 120},
    "peers": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "address": {"type": "str", "required": True},
            "ports": {"type": "list", "elements": "int", "required": True},
            "token": {"type": "str", "required": True, "no_log": False},
            "pid": {"type": "int"},
            "started": {"type": "int"},
        },
    },
    "timeout": {"type": "float", "default": 3.0},
    "bandwidth_seconds": {"type": "float", "default": 0.5},
    "bandwidth_bytes": {"type": "int", "default": 16777216},
    "responder": {
        "type": "dict",
        "options": {
            "pid": {"type": "int", "required": True},
            "started": {"type": "int", "required": True},
            "address": {"type": "str"},
            "ports": {"type": "list", "elements": "int"},
            "token": {"type": "str", "no_log": False},
        },
    },
}


def listening(params: dict[str, Any]) -> dict[str, Any]:
    low, high = port_range(params["data_ports"])
    ask = Ask(params["address"], params["rendezvous_port"], low, high, params["count"], params["deadline"])
    try:
        return dict(start(ask), error="")
    except PeerCheckError as error:
        return {"responder": {}, "holders": [], "error": str(error)}


def checked(module: AnsibleModule, params: dict[str, Any]) -> dict[str, Any]:
    peers = [Peer(peer["address"], peer["ports"], peer["token"]) for peer in params["peers"]]
    limits = Limits(params["timeout"], params["bandwidth_seconds"], params["bandwidth_bytes"])
    return {"links": check(params["address"], peers, limits, runner(module))}


def stopped(params: dict[str, Any]) -> dict[str, Any]:
    responder = params["responder"]
    return {"stopped": bool(responder) and stop(responder["pid"], responder["started"])}


def main() -> None:
    module = checked_module(
        argument_spec=ARGUMENTS,
        bounds={
            "rendezvous_port": (0, 65535),
            "count": (1, 64),
            "deadline": (1, 3600),
            "timeout": (0, 600),
            "bandwidth_seconds": (0, 600),
            "bandwidth_bytes": (0, 2**32),
        },
        supports_check_mode=True,
        required_if=[("state", "listening", ["address"]), ("state", "checked", ["address"])],
    )
    params = module.params
    try:
        if params["state"] == "listening":
            result = listening(params)
        elif params["state"] == "checked":
            result = checked(module, params)
        else:
            result = stopped(params)
        module.exit_json(changed=False, **result)
    except (PeerCheckError, FirewallError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
