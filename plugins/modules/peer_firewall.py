#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
---
module: peer_firewall
short_description: Let the other hosts of a job, and only them, reach this host's ports
version_added: 0.1.0
description:
  - Opens the named ports to the named addresses on whichever of ufw, firewalld, nftables and iptables is active, and
    closes exactly that again. Everything else in the rule set stays byte for byte as it was.
  - It does not work out whether a rule set lets a packet through, but puts its rules wherever a packet can be dropped. Whoever
    calls it tries the connections; O(needed) takes the peers that could not connect, and a rule that does not help is removed by leaving its peer out
    of O(peers).
  - Does nothing if no firewall can drop incoming packets. A chain that jumps to others counts as one that can.
  - Without root it changes nothing and does not fail; RV(commands) then holds what the owner of the host can run.
  - In nftables and iptables the rules go to the head of every chain that filters incoming packets and can drop some, because an accept
    elsewhere would not prevent a drop there. ufw and firewalld get rules of their own kind, firewalld in every zone in use.
  - Chains of other programs (fail2ban, Docker, libvirt, Kubernetes) are left alone; RV(foreign) lists those that may drop packets.
  - The rules survive a reboot with ufw and firewalld, and with nftables and iptables if a saved rule set is loaded at boot (RV(persistent)).
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  name:
    description:
      - Name of the job. It marks the rules, so that only this job's rules are changed or removed.
      - Without it, O(state=absent) removes the rules of all jobs that have no live process on this host.
    type: str
  peers:
    description:
      - IPv4 and IPv6 addresses that are let in.
      - With O(state=present) rules of this job for any other address are removed.
    type: list
    elements: str
    default: []
  needed:
    description:
      - Those of O(peers) that get a rule where there is none, because they cannot connect or were not tried. For the others, rules that are there
        are kept. By default, all of them.
    type: list
    elements: str
  ports:
    description:
      - Ports (V(29500)) and ranges of ports (V(32768-60999)) that are opened.
    type: list
    elements: str
    default: []
  known:
    description:
      - Names of jobs that may have rules here, for O(state=absent) without O(name). Without root, the commands for the owner are for
        these jobs.
    type: list
    elements: str
    default: []
  state:
    description:
      - Whether the rules of this job are there.
      - V(absent) removes every rule of this job, whatever O(peers) and O(ports) are; without root, the commands name those.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Open the rendezvous port and Gloo's ports to the other host
  nanochat.ddp.peer_firewall:
    name: d4
    peers:
      - 192.168.1.11
      - fd00::11
    ports:
      - "29500"
      - 32768-60999
  become: true

- name: Close whatever no running job needs
  nanochat.ddp.peer_firewall:
    state: absent
  become: true
"""

RETURN = r"""
backend:
  description: The firewall that is active and can drop incoming packets, several joined by V(+), or V(none); a guess when RV(needs_root) is true.
  type: str
  returned: always
  sample: ufw
rules:
  description: The rules of this job after the module ran.
  type: list
  elements: str
  returned: always
  sample: ["tcp from 192.168.1.11 to port 29500"]
commands:
  description:
    - The commands that were run, or in check mode would be.
    - Without root, the ones for the owner of the host to run.
  type: list
  elements: str
  returned: always
  sample: ["sudo ufw prepend allow from 192.168.1.11 to any port 29500 proto tcp comment nanochat.ddp:d4"]
foreign:
  description: Chains of other programs that may drop incoming packets. They are not changed.
  type: list
  elements: str
  returned: always
  sample: ["nft chain inet f2b-table f2b-chain"]
persistent:
  description: Whether the rules survive a reboot.
  type: bool
  returned: always
if_closed:
  description: Commands for the owner if ports turn out to be closed and no firewall is visible without root.
  type: list
  elements: str
  returned: always
needs_root:
  description: Whether nothing could be done without root.
  type: bool
  returned: always
message:
  description: A message, for example that no firewall can drop packets.
  type: str
  returned: always
"""

import os

from ..module_utils._firewall.apply import FirewallRequest, apply
from ..module_utils._firewall.rules import NAME, FirewallError, address, check_name, wanted_rules
from ..module_utils._kit.bare import tool
from ..module_utils._kit.module import ansible_module
from ..module_utils._kit.processes import live_runs


def main() -> None:
    module = ansible_module(
        argument_spec={
            "name": {"type": "str"},
            "peers": {"type": "list", "elements": "str", "default": []},
            "needed": {"type": "list", "elements": "str"},
            "ports": {"type": "list", "elements": "str", "default": []},
            "known": {"type": "list", "elements": "str", "default": []},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ["name"])],
        supports_check_mode=True,
    )
    params = module.params
    try:
        request = FirewallRequest(
            job="" if params["name"] is None and params["state"] == "absent" else check_name(params["name"] or ""),
            wanted=wanted_rules(params["peers"], params["ports"]),
            needed=[address(peer) for peer in (params["peers"] if params["needed"] is None else params["needed"])],
            present=params["state"] == "present",
            check=module.check_mode,
            root=os.geteuid() == 0,
            known=tuple(name for name in params["known"] if NAME.match(name)),
            keep=tuple(live_runs()),
        )
        module.exit_json(**apply(tool, request))
    except FirewallError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
