#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: doctor_info
short_description: Collect evidence on one host about a rank that is stuck or died
version_added: 0.1.0
description:
  - Reads the run folder, the rank's process, its connections to the peers, the machine's load, memory, disk and network interfaces, and the
    kernel's messages about memory, in a few seconds.
  - Asks the trainer itself for its Python stacks and its flight record of collectives. This needs no preparation on the host.
  - Changes nothing and signals no process.
extends_documentation_fragment:
  - nanochat.ddp.reader
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  run_dir:
    description: The run folder.
    type: path
    required: true
  rank:
    description: The host's rank.
    type: int
    required: true
  peers:
    description: The other hosts of the job, each with C(host) and C(address).
    type: list
    elements: dict
    default: []
  probe_port:
    description: A port of the job that the peers' firewalls leave open to this host, to test whether packets come back.
    type: int
    required: true
attributes:
  platform:
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Gather evidence
  nanochat.ddp.doctor_info:
    run_dir: /mnt/data/nanochat/runs/d4
    rank: 0
    peers:
      - host: laptop
        address: 192.168.1.11
    probe_port: 32768
  register: evidence
"""

RETURN = r"""
evidence:
  description: The evidence by topic.
  returned: success
  type: dict
  contains:
    run:
      description: The state of the run as M(nanochat.ddp.run_info) returns it.
      type: dict
    process:
      description: State, share of a CPU and memory of the rank's process. Null when there is none.
      type: dict
    dump:
      description: The trainer's own stacks and flight record. Null if there are none.
      type: dict
    sockets:
      description: Its connections to the peers, with unsent and unread bytes and retransmissions.
      type: list
      elements: dict
    links:
      description: Whether packets reach each peer and come back.
      type: dict
    system:
      description: Load, memory, swapping, disk, throttling, network interfaces.
      type: dict
    others:
      description: Other processes that use the CPU.
      type: list
      elements: dict
    kernel:
      description: Kernel messages about OOM kills.
      type: list
      elements: str
"""

from typing import Any, Iterator, Mapping, Sequence

from ..module_utils._doctor.gather import collect
from ..module_utils._kit.arguments import checked_module
from ..module_utils._kit.bare import run_tool


def unfit(peers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why the peers cannot be used; they are nodes of a plan, of which this module reads a part."""
    for number, peer in enumerate(peers):
        for name in ("host", "address"):
            if not isinstance(peer.get(name), str):
                yield f"peers[{number}] has no text {name}; each peer needs `host` and `address`, as the nodes of a plan have them."


def main() -> None:
    module = checked_module(
        argument_spec={
            "run_dir": {"type": "path", "required": True},
            "rank": {"type": "int", "required": True},
            "peers": {"type": "list", "elements": "dict", "default": []},
            "probe_port": {"type": "int", "required": True},
        },
        bounds={"rank": (0, 65535), "probe_port": (1, 65535)},
        supports_check_mode=True,
    )
    wanted = module.params
    for problem in unfit(wanted["peers"]):
        module.fail_json(msg=problem)
    evidence = collect(wanted["run_dir"], wanted["rank"], wanted["peers"], wanted["probe_port"], run_tool)
    module.exit_json(changed=False, evidence=evidence)


if __name__ == "__main__":
    main()
