#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_folder
short_description: Fill and describe a host's folder of shards and a tokenizer, and link it into a run
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Fills the folder from a folder of the same host or from a URL, and describes its files in C(manifest.json). With the manifest,
    M(nanochat.ddp.shard_sync) copies the same files to other hosts, and a run reads exactly these.
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  state:
    description:
      - V(imported) links the chosen shards of O(source) and its tokenizer into O(path). Once O(path) has a manifest, that decides what belongs
        to the data set, whatever the source contains today.
      - V(fetched) downloads missing and broken files among the first O(shards) files of a collection at O(url) and its last one, which is for
        validation. Interrupted downloads resume; truncated and corrupted files are downloaded again.
      - V(described) writes names, sizes and SHA-256 digests of the folder's files to C(manifest.json). An existing manifest stays valid
        unless O(refresh=true).
      - V(linked) makes C(data/) and C(tokenizer/) below O(dest) contain exactly the manifest's files, by hard links into O(path), or symbolic
        links if that fails. Other files there are removed. Every file is checked against its digest first.
    type: str
    choices: [imported, fetched, described, linked]
    required: true
  source:
    description: The folder that holds the shards. Required with O(state=imported).
    type: path
  tokenizer:
    description: The folder of the tokenizer; by default C(tokenizer) in or beside O(source). With O(state=imported).
    type: path
  url:
    description: The base URL of files named C(shard_00000.parquet) and so on. Required with O(state=fetched).
    type: str
  shards:
    description:
      - How many shards to take, including the last one of the folder or collection, which is for validation. V(0) takes all.
      - With O(state=imported) and O(state=fetched).
    type: int
    default: 0
  last_shard:
    description: The number of the collection's last shard. With O(state=fetched).
    type: int
    default: 6542
  retries:
    description: How many times a file is tried; the pauses between the tries double. With O(state=fetched).
    type: int
    default: 6
  parallel:
    description: How many files move at the same time. With O(state=fetched).
    type: int
    default: 3
  id:
    description: Name of the data set in a new manifest; by default the folder's name. With O(state=described).
    type: str
  layout:
    description: V(data) is shards and a tokenizer, V(files) is any folder. With O(state=described).
    type: str
    choices: [data, files]
    default: data
  refresh:
    description: Rebuild the manifest even if there is one. With O(state=described).
    type: bool
    default: false
  manifest:
    description: The manifest with the files' expected digests; by default the folder's own. With O(state=fetched) and O(state=linked).
    type: dict
  dest:
    description: The run folder. Required with O(state=linked).
    type: path
"""

EXAMPLES = r"""
- name: Take eight of the shards that this host has
  nanochat.ddp.shard_folder:
    path: /mnt/data/nanochat/data/books
    state: imported
    source: /srv/books
    shards: 8

- name: Write the manifest of the data set on the first host
  nanochat.ddp.shard_folder:
    path: /mnt/data/nanochat/data/books
    state: described
  register: described
  run_once: true

- name: Let the run read exactly these shards
  nanochat.ddp.shard_folder:
    path: /mnt/data/nanochat/data/books
    state: linked
    dest: /mnt/data/nanochat/runs/d4
"""

RETURN = r"""
manifest:
  description: The manifest that describes the folder.
  returned: O(state=described) or O(state=linked)
  type: dict
  sample:
    format: 1
    id: books
    shards:
      - {name: shard_00000.parquet, bytes: 81246, sha256: 3fb7c1}
    tokenizer: []
digest:
  description: One short digest of names, sizes and digests of all files; equal folders have equal digests.
  returned: O(state=described) or O(state=linked)
  type: str
  sample: 0f343b0931126a20
described:
  description: Whether the folder had a manifest before.
  returned: O(state=described)
  type: bool
files:
  description: The source's files that belong to the data set; if no tokenizer is among them, one must be trained.
  returned: O(state=imported)
  type: list
  elements: str
moved:
  description: Files that were (in check mode, would be) copied or linked.
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
  description: Files that do not belong to the data set; they are removed from O(path) by O(state=imported) and from O(dest) by O(state=linked).
  returned: success
  type: list
  elements: str
links:
  description: How many links of each kind were made.
  returned: when links were made
  type: dict
  sample: {hard: 10, symbolic: 0}
seconds:
  description: How long it took.
  returned: success
  type: float
"""

from ..module_utils._shards.module import PATH, VERIFY, run_module
from ..module_utils._shards.sync import STATES, to_state

SPEC = {
    **PATH,
    **VERIFY,
    "state": {"type": "str", "choices": list(STATES), "required": True},
    "source": {"type": "path"},
    "tokenizer": {"type": "path"},
    "url": {"type": "str"},
    "shards": {"type": "int", "default": 0},
    "last_shard": {"type": "int", "default": 6542},
    "retries": {"type": "int", "default": 6},
    "parallel": {"type": "int", "default": 3},
    "id": {"type": "str"},
    "layout": {"type": "str", "default": "data", "choices": ["data", "files"]},
    "refresh": {"type": "bool", "default": False},
    "manifest": {"type": "dict"},
    "dest": {"type": "path"},
}


def main() -> None:
    run_module(
        to_state,
        SPEC,
        bounds={"shards": (0, 1000000), "last_shard": (0, 10000000), "retries": (1, 100), "parallel": (1, 64)},
        required_if=[("state", "imported", ["source"]), ("state", "fetched", ["url"]), ("state", "linked", ["dest"])],
    )


if __name__ == "__main__":
    main()
