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
  - Brings a data set of numbered parquet shards with its tokenizer in line with a manifest of names, sizes and SHA-256 digests, and links it
    into a run.
  - Hosts take pieces from each other directly, in a chain, without SSH keys between them and without passing through the controller. Each
    host hands on what it has received so far, so the first source sends every file about once, regardless of the number of hosts.
  - Interrupted transfers resume, every piece is checked against its digest before it is kept, and corrupted, truncated and missing
    files are found and repaired.
options:
  path:
    description: The folder of the files on this host.
    type: path
    required: true
  host:
    description: Name of this host in messages and results; by default its own host name.
    type: str
  state:
    description:
      - V(imported) links the chosen shards of O(source) and its tokenizer into O(path). It changes nothing once O(path) has a manifest,
        whatever the source contains today.
      - V(fetched) downloads those of O(names) at O(url) that are missing or broken. Interrupted downloads resume; truncated and corrupted
        files are downloaded again.
      - V(described) writes names, sizes and SHA-256 digests of the folder's shards and tokenizer to C(manifest.json). An existing manifest
        stays valid.
      - V(served) starts a process that serves the manifest's files to the addresses in O(allow), unless the same one runs. It ends by itself
        15 minutes after the last request.
      - V(synced) copies missing and broken files from the hosts in O(peers); it fails after a minute without progress.
      - V(stopped) ends that process and forgets its secret.
      - V(linked) makes C(data/) and C(tokenizer/) below O(dest) contain exactly the manifest's files, by hard links into O(path), or symbolic
        links if that fails. Other files there are removed. Every file is checked against its digest first.
    type: str
    choices: [imported, fetched, described, served, synced, stopped, linked]
    default: synced
  manifest:
    description: The manifest as O(state=described) returned it on the first host; by default the folder's own.
    type: dict
  source:
    description: The folder that holds the shards. Required with O(state=imported).
    type: path
  tokenizer:
    description: The folder of the tokenizer; by default C(tokenizer) in or beside O(source). With O(state=imported).
    type: path
  url:
    description: The base URL of parquet files. Required with O(state=fetched).
    type: str
  names:
    description: The files to download from there; the last one is for validation. Required with O(state=fetched).
    type: list
    elements: str
  shards:
    description:
      - How many shards to take, including the last one of the folder, which is for validation. V(0) takes all. With O(state=imported).
    type: int
    default: 0
  address:
    description: This host's own address, to listen on and to connect from. Required with O(state=served).
    type: str
  ports:
    description: The range in which a free port is taken; without it, any. With O(state=served).
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
    description: The addresses that may connect; other connections are closed. Required with O(state=served).
    type: list
    elements: str
  secret:
    description:
      - Signs the requests of one transfer; the same on all hosts. It never crosses the network or a command line.
      - With O(state=stopped), the transfer whose server is stopped; without it, those of all transfers of this folder.
    type: str
  peers:
    description:
      - The servers of all hosts in the order of the chain, as O(state=served) returned them in RV(server). The source comes first, slow hosts last.
      - This host takes from the one before it, and from the others where that one fails or is slow. With O(state=synced).
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
    description: Folders of this host that may already contain some of the files, which are then linked. With O(state=synced).
    type: list
    elements: path
    default: []
  dest:
    description: The run folder. Required with O(state=linked).
    type: path
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
"""

EXAMPLES = r"""
- name: Write the manifest of the data set on the first host
  nanochat.ddp.shard_sync:
    path: /mnt/data/nanochat/data/books
    state: described
  register: described
  run_once: true

- name: Serve files to the peers
  nanochat.ddp.shard_sync:
    path: /mnt/data/nanochat/data/books
    state: served
    manifest: "{{ described.manifest }}"
    address: 192.168.1.10
    ports: {low: 32768, high: 60999}
    allow: [192.168.1.10, 192.168.1.11]
    secret: "{{ transfer_secret }}"
  register: serving

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
  description: The manifest that describes the folder; of files above 4 MB it has the digests of their pieces, shortened.
  returned: O(state=described), O(state=synced) or O(state=linked)
  type: dict
  sample:
    format: 1
    id: books
    shards:
      - {name: shard_00000.parquet, bytes: 81246, sha256: 3fb7c1}
    tokenizer: []
digest:
  description: One short digest of names, sizes and digests of all files; equal folders have equal digests.
  returned: O(state=described), O(state=synced) or O(state=linked)
  type: str
  sample: 0f343b0931126a20
files:
  description: The source's files that belong to the data set; if no tokenizer is among them, one must be trained.
  returned: O(state=imported)
  type: list
  elements: str
server:
  description: The server of this folder, for O(peers); C(port) is null in check mode.
  returned: O(state=served)
  type: dict
  sample: {host: desktop, address: 192.168.1.10, port: 40123}
moved:
  description: Files that were (in check mode, would be) copied or linked; with O(state=served), those that are missing or broken.
  returned: success
  type: list
  elements: str
bytes:
  description: Bytes that were (in check mode, would be) copied.
  returned: success
  type: int
from:
  description: Bytes by the host or URL they came from.
  returned: success
  type: dict
  sample: {desktop: 81246}
repaired:
  description: Damaged files and what was wrong with them.
  returned: success
  type: dict
  sample: {shard_00001.parquet: truncated}
"""

import platform

from ..module_utils._kit.module import ansible_module
from ..module_utils._shards import states
from ..module_utils._shards.url import fetch

STATES = {**states.STATES, "fetched": fetch}
SPEC = {**states.OPTIONS, "state": {**states.OPTIONS["state"], "choices": list(STATES)}}
REQUIRED_IF = [
    ("state", "imported", ["source"]),
    ("state", "fetched", ["url", "names"]),
    ("state", "served", ["address", "allow", "secret"]),
    ("state", "linked", ["dest"]),
]


def main() -> None:
    module = ansible_module(argument_spec=SPEC, supports_check_mode=True, required_if=REQUIRED_IF)
    given = {**module.params, "host": module.params["host"] or platform.node()}
    result = states.shard_sync(check=module.check_mode, states=STATES, **given)
    (module.fail_json if result.get("failed") else module.exit_json)(**result)


if __name__ == "__main__":
    main()
