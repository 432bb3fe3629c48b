#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_info
short_description: Collect the facts of a host that a distributed training job depends on
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Reads what a training job needs to know about a host. This covers network interfaces and the
    routes to the peers, names, cores and their features, memory, room on the disk, Python, tmux, who
    holds the ports, and which training processes are still there.
  - Changes and sends nothing, needs neither root nor packages, and takes less than a second.
options:
  base_dir:
    description: Folder below which the job keeps everything. It need not exist.
    type: str
    default: ~/nanochat-ddp
  run_dir:
    description: Folder of the run to look at. Without it C(probe.run) is C(null).
    type: str
  venv_dir:
    description: The trainer's virtual environment. By default C(venv) in O(base_dir).
    type: str
  python:
    description: A Python to check before the detected ones.
    type: str
  ports:
    description: TCP ports whose holders to report.
    type: list
    elements: int
    default: []
  peers:
    description: Names or addresses of the other hosts of the job, to see how they would be reached.
    type: list
    elements: str
    default: []
  base_run:
    description: Name of the run whose model this run uses, to see its checkpoints. Without it C(probe.base_run) is C(null).
    type: str
  folders:
    description: Folders of text, shards or a tokenizer, to see whether they are there and what they hold.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - nanochat.ddp.reader
"""

EXAMPLES = r"""
- name: Look at the host
  nanochat.ddp.host_info:
    base_dir: /mnt/data/nanochat
    ports: [29500]
    peers: [laptop, 192.168.1.11]
  register: result

- name: Show the interfaces that are up
  ansible.builtin.debug:
    msg: "{{ result.probe.nics | selectattr('up') | map(attribute='name') }}"
"""

RETURN = r"""
probe:
  description: The facts of the host. Their types are in C(module_utils/_contract/probe.py).
  returned: success
  type: dict
  sample:
    host: {hostname: laptop, arch: x86_64, user: xiaoxin}
    cpu: {available: 16, available_physical: 8, native_bf16: false}
    memory: {total: 33000000000, available: 30000000000}
    nics: [{name: enp4s0, kind: wired, up: true, speed_mbit: 1000, ipv4: [192.168.1.10/24]}]
    ports: [{port: 29500, pid: 4711, user: lzw, command: torchrun, session: null, run: null}]
"""

from ..module_utils._kit.arguments import checked_module
from ..module_utils._probe.host import OPTIONS, probe


def main() -> None:
    module = checked_module(argument_spec=OPTIONS, supports_check_mode=True)
    folder = getattr(module, "_remote_tmp", None) or "~/.ansible/tmp"
    module.exit_json(changed=False, probe=probe(**module.params, remote_tmp=folder))


if __name__ == "__main__":
    main()
