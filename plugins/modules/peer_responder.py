#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
---
module: peer_responder
short_description: Run a short-lived process that answers the other hosts of a job while connections are tested
version_added: 0.1.0
description:
  - V(started) starts a process that answers M(nanochat.ddp.peer_check) of the other hosts on the host's own address,
    V(stopped) ends it.
  - Leaves nothing behind; the process ends by itself at its deadline. Works without root.
  - Waits while another such process of this user holds the rendezvous port. One that an interrupted play left behind, and that nobody uses, is
    told to end; no other process is ever signalled.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  state:
    description: Whether the process is started or stopped.
    type: str
    choices: [started, stopped]
    default: started
  address:
    description: The host's own address in the job. The process listens only there.
    type: str
  rendezvous_port:
    description:
      - The port on which the master will wait for the others. V(0) on all other hosts.
      - If another process holds it, RV(holders) names that.
    type: int
    default: 0
  ports:
    description:
      - Further ports on which this host will listen, such as the keeper's. Those that another process holds are left out.
    type: list
    elements: int
    default: []
  data_ports:
    description:
      - The range in which the hosts will open connections for data.
      - Both ends of it and some ports between them are tried.
    type: str
    default: 32768-60999
  count:
    description: How many data ports are opened.
    type: int
    default: 3
  deadline:
    description: Seconds after which the process ends by itself.
    type: int
    default: 120
  pid:
    description: With O(state=stopped), the process, as RV(responder) named it.
    type: int
  started:
    description:
      - With O(state=stopped), the clock tick at which that process started, so that no other process with its number is signalled.
    type: int
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
  - module: nanochat.ddp.peer_check
"""

EXAMPLES = r"""
- name: Start answering the other hosts
  nanochat.ddp.peer_responder:
    address: 192.168.1.10
    rendezvous_port: 29500
    data_ports: 32768-60999
  register: answering

- name: Stop answering the other hosts
  nanochat.ddp.peer_responder:
    state: stopped
    pid: "{{ answering.responder.pid }}"
    started: "{{ answering.responder.started }}"
"""

RETURN = r"""
responder:
  description: Data for the peers and for stopping; empty if it did not start.
  type: dict
  returned: with O(state=started)
  contains:
    address:
      description: Where it listens.
      type: str
    ports:
      description: On which ports.
      type: list
      elements: int
    token:
      description: The token that a peer must send.
      type: str
    pid:
      description: Its process.
      type: int
    started:
      description: The clock tick at which it started.
      type: int
holders:
  description: Processes that hold the rendezvous port, each with port, address, user, pid, command, marker and run.
  type: list
  elements: dict
  returned: with O(state=started)
error:
  description: Why it did not start, for example because the address is not on this host.
  type: str
  returned: with O(state=started)
stopped:
  description: Whether a process was ended.
  type: bool
  returned: with O(state=stopped)
"""

from typing import Any, Mapping

from ..module_utils._firewall.rules import FirewallError, port_range
from ..module_utils._kit.arguments import checked_module
from ..module_utils._preflight.peer_responder import Ask, PeerCheckError, Started, start, stop

ARGUMENTS: dict[str, object] = {
    "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
    "address": {"type": "str"},
    "rendezvous_port": {"type": "int", "default": 0},
    "ports": {"type": "list", "elements": "int", "default": []},
    "data_ports": {"type": "str", "default": "32768-60999"},
    "count": {"type": "int", "default": 3},
    "deadline": {"type": "int", "default": 120},
    "pid": {"type": "int"},
    "started": {"type": "int"},
}


def started(params: Mapping[str, Any]) -> Started:
    """Start the process; a failure to start is a result."""
    low, high = port_range(params["data_ports"])
    named = (params["address"], params["rendezvous_port"], params["ports"])
    ask = Ask(*named, low, high, params["count"], params["deadline"])
    try:
        return start(ask)
    except PeerCheckError as error:
        return {"responder": {}, "holders": [], "error": str(error)}


def main() -> None:
    module = checked_module(
        argument_spec=ARGUMENTS,
        bounds={"rendezvous_port": (0, 65535), "count": (1, 64), "deadline": (1, 3600)},
        supports_check_mode=True,
        required_if=[("state", "started", ["address"]), ("state", "stopped", ["pid", "started"])],
    )
    params = module.params
    try:
        if params["state"] == "started":
            module.exit_json(changed=False, **started(params))
        module.exit_json(changed=False, stopped=stop(params["pid"], params["started"]))
    except (PeerCheckError, FirewallError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
