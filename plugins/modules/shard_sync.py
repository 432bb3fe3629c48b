#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_sync
short_description: Copy the same shards and tokenizer to every host of a job
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Brings a folder (a data set of numbered parquet shards with its tokenizer, or any other folder) in line with a
    manifest of names, sizes and SHA-256 digests.
  - Hosts pull from each other directly, without SSH keys between them and without passing through the controller. Each
    host serves what it has finished, so the first source sends every file about once, regardless of the number of hosts.
  - Interrupted transfers resume, every file is checked against its digest before it gets its name, and corrupted, truncated and missing
    files are found and repaired.
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  manifest:
    description: The manifest as M(nanochat.ddp.shard_folder) returned it on the first host.
    type: dict
  layout:
    description: V(data) is shards and a tokenizer, V(files) is any folder.
    type: str
    choices: [data, files]
    default: data
  peers:
    description: The servers of the other hosts, as M(nanochat.ddp.shard_server) returned them.
    type: list
    elements: dict
    default: []
    suboptions:
      host:
        description: Its name.
        type: str
        required: true
      address:
        description: Where it listens.
        type: str
        required: true
      port:
        description: Its port.
        type: int
        required: true
  seeds:
    description: Folders of this host that may already contain some of the files, which are then linked.
    type: list
    elements: path
    default: []
  address:
    description: This host's own address, to connect from.
    type: str
  secret:
    description: Signs the requests of one transfer; the same on all hosts. It never crosses the network or a command line.
    type: str
  parallel:
    description: How many files move at the same time.
    type: int
    default: 3
  timeout:
    description: Fail after this many seconds without progress.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Fetch what is missing or broken from the hosts that have it
  nanochat.ddp.shard_sync:
    path: /home/xiaoxin/nanochat/data/books
    manifest: "{{ described.manifest }}"
    peers:
      - host: desktop
        address: 192.168.1.10
        port: 40123
    secret: "{{ transfer_secret }}"
"""

RETURN = r"""
manifest:
  description: The manifest that describes the folder.
  returned: success
  type: dict
  sample:
    format: 1
    id: books
    shards:
      - {name: shard_00000.parquet, bytes: 81246, sha256: 3fb7c1}
    tokenizer: []
digest:
  description: One short digest of names, sizes and digests of all files; equal folders have equal digests.
  returned: success
  type: str
  sample: 0f343b0931126a20
moved:
  description: Files that were (in check mode, would be) copied here.
  returned: success
  type: list
  elements: str
bytes:
  description: Bytes that were (in check mode, would be) copied.
  returned: success
  type: int
from:
  description: Bytes of finished files by the host or URL they came from.
  returned: success
  type: dict
  sample: {desktop: 81246}
repaired:
  description: Damaged files and what was wrong with them.
  returned: success
  type: dict
  sample: {shard_00001.parquet: truncated}
extra:
  description: Files that are not in the manifest; they are kept.
  returned: success
  type: list
  elements: str
seconds:
  description: How long it took.
  returned: success
  type: float
"""

from ..module_utils._shards.module import PATH, VERIFY, run_module
from ..module_utils._shards.sync import sync

SPEC = {
    **PATH,
    **VERIFY,
    "manifest": {"type": "dict"},
    "layout": {"type": "str", "default": "data", "choices": ["data", "files"]},
    "peers": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "host": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
        },
    },
    "seeds": {"type": "list", "elements": "path", "default": []},
    "address": {"type": "str"},
    "secret": {"type": "str", "no_log": True},
    "parallel": {"type": "int", "default": 3},
    "timeout": {"type": "int", "default": 60},
}


def main() -> None:
    run_module(sync, SPEC, bounds={"parallel": (1, 64), "timeout": (1, 86400)})


if __name__ == "__main__":
    main()
