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
    description: Folder of the run to look at. Without it RV(probe.run) is C(null).
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
    description: Name of the run whose model this run goes on from, to see its checkpoints. Without it RV(probe.base_run) is C(null).
    type: str
  folders:
    description: Folders of text, shards or a tokenizer, to see whether they are there and what they hold.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Can run in check mode and tell what it would do without doing it.
    support: full
    details: It only reads.
  diff_mode:
    description: Returns what was changed in diff mode.
    support: N/A
    details: It changes nothing.
  idempotent:
    description: Running it again changes nothing.
    support: full
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
  description: The facts.
  returned: success
  type: dict
  contains:
    host:
      description: Name, identity, kernel, architecture, user and clock (epoch seconds) of the host.
      type: dict
      returned: success
      sample: {hostname: laptop, boot_id: 5ef6b123-74cb-4399-b0f7-9f7c78f000c6, arch: x86_64, user: xiaoxin, time: 1790000000.5}
    python:
      description: This Python, those of 3.10 and newer, where the library's sources lie, and the trainer's environment.
      type: dict
      returned: success
      sample: {version: 3.11.2, candidates: [{executable: /usr/bin/python3.11, version: 3.11.2, venv_module: true}]}
    cpu:
      description: Model, features, cores in all and those that this user may use, load, and whether bfloat16 is native.
      type: dict
      returned: success
      sample: {logical: 16, physical: 8, available: 16, available_physical: 8, native_bf16: false, sets: [{name: all cores, cpus: [0, 1]}]}
    memory:
      description: Bytes of memory and swap, within the limit of the control group if there is one.
      type: dict
      returned: success
      sample: {total: 33000000000, available: 30000000000, limit: null}
    disk:
      description: Room below the base folder, whether it can be written, and the file system it is on.
      type: dict
      returned: success
      sample: {path: /mnt/data/nanochat, free: 400000000000, writable: true, fstype: ext4}
    nics:
      description: Network interfaces with kind (wired, wifi, virtual, overlay, bridge or loopback), state, speed and addresses.
      type: list
      elements: dict
      returned: success
      sample: [{name: enp4s0, kind: wired, up: true, speed_mbit: 1000, duplex: full, mtu: 1500, ipv4: [192.168.1.10/24]}]
    routes:
      description: For each peer, and for C(default), the interface and own address that packets to it would take.
      type: list
      elements: dict
      returned: success
      sample: [{peer: laptop, address: 192.168.1.11, nic: enp4s0, source: 192.168.1.10, gateway: null}]
    names:
      description: What the own name and the peers' names resolve to on this host.
      type: dict
      returned: success
      sample: {own: [127.0.1.1], peers: {laptop: [192.168.1.11]}}
    sudo:
      description: Root's rights without a password. One of C(root), C(passwordless) and C(none). The role plan adds C(password).
      type: str
      returned: success
      sample: none
    tmux:
      description: Path and version of tmux, or C(null).
      type: dict
      returned: success
      sample: {path: /usr/bin/tmux, version: 3.3a}
    ports:
      description: Holders of the given ports. C(session) and C(run) are those of this collection that they belong to.
      type: list
      elements: dict
      returned: success
      sample: [{port: 29500, pid: 4711, user: lzw, command: torchrun, session: null, run: null}]
    processes:
      description: Training processes, whoever started them.
      type: list
      elements: dict
      returned: success
      sample: []
    limits:
      description: Limits of open files, processes, locked and all memory, the size of a file and seconds of computing. C(null) for none.
      type: dict
      returned: success
      sample: {nofile: 1024, nproc: 127000, memlock: 8388608, address_space: null, file_size: null, cpu_seconds: null}
    logout:
      description: Whether systemd ends what the user leaves running at logout, and whether the user lingers.
      type: dict
      returned: success
      sample: {kills: false, lingers: true}
    transfer:
      description: Ansible's folder and the login shell, where both together keep Ansible from copying files to the host. Else C(null).
      type: dict
      returned: success
      sample: {folder: /home/xiao xin/.ansible/tmp, shell: /bin/bash}
    security:
      description: State of SELinux and AppArmor, and the label under which this login's processes run.
      type: dict
      returned: success
      sample: {selinux: absent, apparmor: enabled, label: unconfined}
    ephemeral:
      description: The range of local ports, on which Gloo listens.
      type: dict
      returned: success
      sample: {low: 32768, high: 60999}
    gpus:
      description: NVIDIA GPUs.
      type: list
      elements: dict
      returned: success
      sample: []
    base_dir:
      description: The base folder with C(~) expanded.
      type: str
      returned: success
      sample: /mnt/data/nanochat
    venv_dir:
      description: The trainer's environment with C(~) expanded.
      type: str
      returned: success
      sample: /mnt/data/nanochat/venv
    run:
      description: >-
        What is in the run's folder. Digest of the plan, what of it the checkpoints depend on, rows and processors of each host under it,
        session, steps of the checkpoints.
      type: dict
      returned: success
      sample: {exists: true, plan_digest: 0123456789abcdef, checkpoints: [5, 10]}
    base_run:
      description: The same of the run whose model this one goes on from, or C(null) where none was named.
      type: dict
      returned: success
      sample: null
    data:
      description: Data sets in the store.
      type: list
      elements: dict
      returned: success
      sample: [{id: text-1a2b3c4d, shards: 3, bytes: 12000000}]
    folders:
      description: For each of the folders asked for, its kind (folder, file or absent) and what it holds.
      type: dict
      returned: success
      sample: {/srv/text: {path: /srv/text, kind: folder, readable: true, shards: 0, tokenizer: false, files: true}}
    measured:
      description: What was measured on this host before, or C(null).
      type: dict
      returned: success
      sample: null
"""

from typing import Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.host import OPTIONS, probe


def main() -> None:
    module = checked_module(
        argument_spec=OPTIONS,
        supports_check_mode=True,
    )

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        try:
            code, out, err = module.run_command(list(argv), environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        except OSError as why:  # a link to nothing, or a program for another kind of machine
            return 127, "", f"{argv[0]}: {why.strerror}"
        return int(code), str(out), str(err)

    def find(name: str) -> str | None:
        path = module.get_bin_path(name, opt_dirs=list(bare.MORE_PATHS))
        return str(path) if path else None

    # As Ansible's settings and the inventory say.
    module.exit_json(
        changed=False, probe=probe(run, find, **module.params, remote_tmp=module._remote_tmp or "~/.ansible/tmp")
    )


if __name__ == "__main__":
    main()
