#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_sync
short_description: Bring the same shards and tokenizer to every host of a job
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Keeps a folder of files (a data set of numbered parquet shards with its tokenizer, or any other folder) in line with
    one manifest of names, sizes and SHA-256 digests on all hosts.
  - Hosts pull from each other directly, without SSH keys between them and without passing through the controller. Each
    host hands on what it has finished, so that the first source sends every file about once, however many hosts there
    are.
  - Transfers resume where they were cut, every file is checked against its digest before it gets its name, and files
    that are corrupted, truncated or missing are found and repaired.
attributes:
  check_mode:
    description: Says what would be made, moved or linked, and changes nothing.
    support: full
  diff_mode:
    description: Shows the files before and after.
    support: full
  idempotent:
    description: A second run changes nothing; unchanged files are not even read again.
    support: full
options:
  path:
    description: The folder of the files on this host.
    type: path
    required: true
  state:
    description:
      - V(manifest) describes the folder in C(manifest.json). A manifest that is already there stays the truth unless
        O(refresh=true).
      - V(imported) takes the shards and the tokenizer of an existing folder of this host into O(path) by links.
      - V(fetched) downloads numbered shards from O(url).
      - V(serving) starts a short-lived server which hands the folder's verified files to the addresses in O(allow).
      - V(synced) brings the folder in line with O(manifest) from the servers in O(peers).
      - V(linked) makes C(data/) and C(tokenizer/) below O(dest) hold exactly the manifest's files, by links.
      - V(stopped) ends the server that V(serving) started for this folder.
    type: str
    choices: [manifest, imported, fetched, serving, synced, linked, stopped]
    default: synced
  host:
    description: Name of this host in messages and results; by default its own host name.
    type: str
  id:
    description: Name of the data set in a new manifest; by default the folder's name.
    type: str
  layout:
    description: V(data) is shards and a tokenizer, V(files) is any folder.
    type: str
    choices: [data, files]
    default: data
  manifest:
    description:
      - The manifest as O(state=manifest) returned it on the first host; by default the folder's own where that is enough.
    type: dict
  refresh:
    description: With O(state=manifest), rebuild the manifest even if there is one.
    type: bool
    default: false
  verify:
    description:
      - V(changed) reads only files whose size, time or inode have changed since they were read last.
      - V(full) reads every file, which also finds bytes that rotted on the disk.
    type: str
    choices: [changed, full]
    default: changed
  source:
    description: With O(state=imported), the folder that holds the shards.
    type: path
  tokenizer:
    description: With O(state=imported), the folder of the tokenizer; by default C(tokenizer) in or beside O(source).
    type: path
  url:
    description: With O(state=fetched), the base URL of files named C(shard_00000.parquet) and so on.
    type: str
  shards:
    description:
      - With O(state=fetched) and O(state=imported), how many shards to take, the last one of the collection among them,
        which is validation. V(0) takes all.
    type: int
    default: 0
  last_shard:
    description: With O(state=fetched), the number of the collection's last shard.
    type: int
    default: 6542
  retries:
    description: With O(state=fetched), how many times a file is tried; the pauses between the tries double.
    type: int
    default: 6
  parallel:
    description: How many files move at the same time.
    type: int
    default: 3
  address:
    description: This host's own address, to listen on (O(state=serving)) and to connect from (O(state=synced)).
    type: str
  ports:
    description: With O(state=serving), the range in which a free port is taken; without it, any.
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
    description: With O(state=serving), the addresses that may ask; all others are hung up on.
    type: list
    elements: str
    default: []
  secret:
    description:
      - Signs the requests of one transfer; the same on all hosts. It never crosses the network or a command line.
    type: str
  lifetime:
    description: With O(state=serving), after how many seconds the server ends in any case.
    type: int
    default: 86400
  idle:
    description: With O(state=serving), after how many seconds without a request the server ends.
    type: int
    default: 900
  peers:
    description: With O(state=synced), the servers of the other hosts.
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
        description: The port that O(state=serving) returned.
        type: int
        required: true
  seeds:
    description:
      - With O(state=synced), folders of this host in which some of the files may be already; they are linked.
    type: list
    elements: path
    default: []
  timeout:
    description: With O(state=synced), for how many seconds nothing may move before it fails.
    type: int
    default: 60
  dest:
    description: With O(state=linked), the run folder.
    type: path
"""

EXAMPLES = r"""
- name: Describe the data set on the first host
  nanochat.ddp.shard_sync:
    path: /mnt/data/nanochat/data/books
    state: manifest
  register: described
  run_once: true

- name: Let the peers fetch from this host
  nanochat.ddp.shard_sync:
    path: /mnt/data/nanochat/data/books
    state: serving
    address: 192.168.1.10
    ports: {low: 32768, high: 60999}
    allow: [192.168.1.10, 192.168.1.11]
    secret: "{{ transfer_secret }}"
  register: serving

- name: Fetch what is missing or broken from whoever has it
  nanochat.ddp.shard_sync:
    path: /home/xiaoxin/nanochat/data/books
    state: synced
    manifest: "{{ described.manifest }}"
    peers:
      - host: desktop
        address: 192.168.1.10
        port: 40123
    secret: "{{ transfer_secret }}"

- name: Let the run read exactly these shards
  nanochat.ddp.shard_sync:
    path: /home/xiaoxin/nanochat/data/books
    state: linked
    dest: /home/xiaoxin/nanochat/runs/d4
"""

RETURN = r"""
manifest:
  description: The manifest that the folder is described by or was brought in line with.
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
  description: Files that were (in check mode, would be) brought here, or names that were linked.
  returned: success
  type: list
  elements: str
bytes:
  description: How much was (in check mode, would be) brought here.
  returned: success
  type: int
seconds:
  description: How long it took.
  returned: success
  type: float
from:
  description: Bytes of finished files by the host or URL they came from.
  returned: success
  type: dict
  sample: {desktop: 81246}
repaired:
  description: Files that were there but not right, and what was wrong with them.
  returned: success
  type: dict
  sample: {shard_00001.parquet: truncated}
extra:
  description: Files that are no part of the manifest; kept in a store, removed from a run's folders.
  returned: success
  type: list
  elements: str
files:
  description: The files of the source that belong to the data set; without a tokenizer among them one has to be trained.
  returned: O(state=imported)
  type: list
  elements: str
server:
  description: The server of this folder as O(peers) takes it; C(port) is null in check mode.
  returned: O(state=serving) or O(state=stopped)
  type: dict
  sample: {host: desktop, address: 192.168.1.10, port: 40123}
pid:
  description: The server's process.
  returned: O(state=serving) or O(state=stopped)
  type: int
  sample: 4711
served:
  description: Bytes that the server has sent, by file; counted when it has stopped.
  returned: O(state=serving) or O(state=stopped)
  type: dict
  sample: {shard_00000.parquet: 81246}
described:
  description: Whether the folder had a manifest before.
  returned: O(state=manifest)
  type: bool
links:
  description: How many links of each kind were made.
  returned: O(state=linked) when links were made
  type: dict
  sample: {hard: 10, symbolic: 0}
"""

import platform

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import ShardsError
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.sync import Request, run

SPEC = {
    "path": {"type": "path", "required": True},
    "state": {
        "type": "str",
        "default": "synced",
        "choices": ["manifest", "imported", "fetched", "serving", "synced", "linked", "stopped"],
    },
    "host": {"type": "str"},
    "id": {"type": "str"},
    "layout": {"type": "str", "default": "data", "choices": ["data", "files"]},
    "manifest": {"type": "dict"},
    "refresh": {"type": "bool", "default": False},
    "verify": {"type": "str", "default": "changed", "choices": ["changed", "full"]},
    "source": {"type": "path"},
    "tokenizer": {"type": "path"},
    "url": {"type": "str"},
    "shards": {"type": "int", "default": 0},
    "last_shard": {"type": "int", "default": 6542},
    "retries": {"type": "int", "default": 6},
    "parallel": {"type": "int", "default": 3},
    "address": {"type": "str"},
    "ports": {
        "type": "dict",
        "options": {"low": {"type": "int", "required": True}, "high": {"type": "int", "required": True}},
    },
    "allow": {"type": "list", "elements": "str", "default": []},
    "secret": {"type": "str", "no_log": True},
    "lifetime": {"type": "int", "default": 86400},
    "idle": {"type": "int", "default": 900},
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
    "timeout": {"type": "int", "default": 60},
    "dest": {"type": "path"},
}
REQUIRED_IF = [
    ("state", "imported", ["source"]),
    ("state", "fetched", ["url"]),
    ("state", "serving", ["address", "allow", "secret"]),
    ("state", "linked", ["dest"]),
]


def main() -> None:
    module = checked_module(
        argument_spec=SPEC,
        required_if=REQUIRED_IF,
        bounds={
            "shards": (0, 1000000),
            "last_shard": (0, 10000000),
            "retries": (1, 100),
            "parallel": (1, 64),
            "lifetime": (1, 31 * 86400),
            "idle": (1, 31 * 86400),
            "timeout": (1, 86400),
            "ports.low": (0, 65535),
            "ports.high": (0, 65535),
        },
        supports_check_mode=True,
    )
    given = module.params
    request = Request(
        host=given["host"] or platform.node(),
        path=given["path"],
        check=module.check_mode,
        id=given["id"] or "",
        layout=given["layout"],
        full=given["verify"] == "full",
        manifest=given["manifest"],
        options=given,
    )
    try:
        module.exit_json(**run(given["state"], request))
    except ShardsError as why:
        module.fail_json(msg=str(why))


if __name__ == "__main__":
    main()
