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
  - Connects to the processes that M(nanochat.ddp.peer_responder) has started on the other hosts.
  - Tests every port of every peer, then round trips, then a short stream of full-size packets that must not be fragmented.
  - A port that cannot be reached is a result and not a failure. Changes nothing, and works without root.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  address:
    description: The host's own address in the job, from which connections are made.
    type: str
    required: true
  peers:
    description:
      - Address, ports and token of the RV(nanochat.ddp.peer_responder#module:responder) of every other host, in the order in which
        rates are measured.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Where that host answers.
        type: str
        required: true
      ports:
        description: On which ports.
        type: list
        elements: int
        required: true
      token:
        description: The token that its process requires.
        type: str
        required: true
      measure:
        description: Whether the rate is measured as well.
        type: bool
        default: true
  timeout:
    description: Seconds to wait for a connection before it counts as dropped.
    type: float
    default: 3.0
  bandwidth_seconds:
    description: Maximum seconds to measure each rate.
    type: float
    default: 0.5
  bandwidth_bytes:
    description: Maximum bytes to send for it.
    type: int
    default: 16777216
  deadline:
    description: After this many seconds no further rate is measured; the remaining links are marked.
    type: float
    default: 60.0
extends_documentation_fragment:
  - nanochat.ddp.reader
seealso:
  - module: nanochat.ddp.peer_responder
  - module: nanochat.ddp.peer_firewall
"""

EXAMPLES = r"""
- name: Test whether the other hosts can be reached
  nanochat.ddp.peer_check:
    address: 192.168.1.10
    peers:
      - address: 192.168.1.11
        ports: [32768, 41000, 60999]
        token: 5f2c9d0e5f2c9d0e5f2c9d0e5f2c9d0e
  register: links
"""

RETURN = r"""
closed:
  description: How many of the tested ports cannot be reached. A port where another program answers counts as reachable.
  returned: success
  type: int
  sample: 0
links:
  description: One entry for every peer, in the same order. Their keys are those of LinkTry in C(module_utils/_preflight/peer_check.py).
  type: list
  elements: dict
  returned: success
  sample: [{address: 192.168.1.11, ports: [{port: 29500, error: ''}], latency_ms: 0.21, bandwidth_mbit: 941.0, mtu: 1500, error: ''}]
"""


from ..module_utils._kit.arguments import checked_module
from ..module_utils._preflight.peer_check import CheckedPeer, CheckLimits, check, closed_ports

ARGUMENTS: dict[str, object] = {
    "address": {"type": "str", "required": True},
    "peers": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "address": {"type": "str", "required": True},
            "ports": {"type": "list", "elements": "int", "required": True},
            "token": {"type": "str", "required": True, "no_log": False},
            "measure": {"type": "bool", "default": True},
        },
    },
    "timeout": {"type": "float", "default": 3.0},
    "bandwidth_seconds": {"type": "float", "default": 0.5},
    "bandwidth_bytes": {"type": "int", "default": 16777216},
    "deadline": {"type": "float", "default": 60.0},
}


def main() -> None:
    module = checked_module(
        argument_spec=ARGUMENTS,
        bounds={
            "timeout": (0, 600),
            "bandwidth_seconds": (0, 600),
            "bandwidth_bytes": (0, 2**32),
            "deadline": (0, 3600),
        },
        supports_check_mode=True,
    )
    params = module.params
    peers = [CheckedPeer(**peer) for peer in params["peers"]]
    limits = CheckLimits(params["timeout"], params["bandwidth_seconds"], params["bandwidth_bytes"], params["deadline"])
    links = check(params["address"], peers, limits)
    module.exit_json(changed=False, links=links, closed=sum(len(closed_ports(link["ports"])) for link in links))


if __name__ == "__main__":
    main()
