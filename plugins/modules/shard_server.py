#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_server
short_description: Run a short-lived server of a folder's files for the other hosts
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Starts or stops a process that serves a folder's verified files to the addresses in O(allow). It ends by itself.
  - M(nanochat.ddp.shard_sync) on the other hosts fetches from it.
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  state:
    description: V(started) starts the server unless the same one runs; V(stopped) ends it and forgets its secret.
    type: str
    choices: [started, stopped]
    default: started
  manifest:
    description: The manifest whose files are served; by default the folder's own.
    type: dict
  address:
    description: This host's own address, to listen on.
    type: str
  ports:
    description: The range in which a free port is taken; without it, any.
    type: dict
    suboptions:
      low:
        description: The lowest port.
        type: int
        required: true
      high:
        description: The highest port.
        type: int
        required: true
  allow:
    description: The addresses that may connect; other connections are closed.
    type: list
    elements: str
    default: []
  secret:
    description:
      - Signs the requests of one transfer; the same on all hosts. It never crosses the network or a command line.
      - With O(state=stopped), the transfer whose server is stopped; without it, those of all transfers of this folder.
    type: str
  lifetime:
    description: After how many seconds the server ends in any case.
    type: int
    default: 86400
  idle:
    description: After how many seconds without a request the server ends.
    type: int
    default: 900
"""

EXAMPLES = r"""
- name: Serve files to the peers
  nanochat.ddp.shard_server:
    path: /mnt/data/nanochat/data/books
    address: 192.168.1.10
    ports: {low: 32768, high: 60999}
    allow: [192.168.1.10, 192.168.1.11]
    secret: "{{ transfer_secret }}"
  register: serving

- name: Stop serving
  nanochat.ddp.shard_server:
    path: /mnt/data/nanochat/data/books
    state: stopped
"""

RETURN = r"""
server:
  description: The server of this folder, for O(nanochat.ddp.shard_sync#module:peers); C(port) is null in check mode.
  returned: success
  type: dict
  sample: {host: desktop, address: 192.168.1.10, port: 40123}
pid:
  description: The server's process.
  returned: success
  type: int
  sample: 4711
served:
  description: Bytes that the server has sent, by file; known once it has stopped.
  returned: success
  type: dict
  sample: {shard_00000.parquet: 81246}
"""

from ..module_utils._shards.module import PATH, VERIFY, run_module
from ..module_utils._shards.share import serve_or_stop

SPEC = {
    **PATH,
    **VERIFY,
    "state": {"type": "str", "default": "started", "choices": ["started", "stopped"]},
    "manifest": {"type": "dict"},
    "address": {"type": "str"},
    "ports": {
        "type": "dict",
        "options": {"low": {"type": "int", "required": True}, "high": {"type": "int", "required": True}},
    },
    "allow": {"type": "list", "elements": "str", "default": []},
    "secret": {"type": "str", "no_log": True},
    "lifetime": {"type": "int", "default": 86400},
    "idle": {"type": "int", "default": 900},
}


def main() -> None:
    run_module(
        serve_or_stop,
        SPEC,
        bounds={
            "lifetime": (1, 31 * 86400),
            "idle": (1, 31 * 86400),
            "ports.low": (0, 65535),
            "ports.high": (0, 65535),
        },
        required_if=[("state", "started", ["address", "allow", "secret"])],
    )


if __name__ == "__main__":
    main()
