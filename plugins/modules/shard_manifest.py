#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_manifest
short_description: Describe a folder of shards in a manifest
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Writes names, sizes and SHA-256 digests of the folder's files to C(manifest.json), by which M(nanochat.ddp.shard_sync)
    brings the same files to other hosts.
  - A manifest that is already there stays the truth unless O(refresh=true).
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  id:
    description: Name of the data set in a new manifest; by default the folder's name.
    type: str
  layout:
    description: V(data) is shards and a tokenizer, V(files) is any folder.
    type: str
    choices: [data, files]
    default: data
  refresh:
    description: Rebuild the manifest even if there is one.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Describe the data set on the first host
  nanochat.ddp.shard_manifest:
    path: /mnt/data/nanochat/data/books
  register: described
  run_once: true
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
described:
  description: Whether the folder had a manifest before.
  returned: success
  type: bool
seconds:
  description: How long it took.
  returned: success
  type: float
"""

from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import PATH, VERIFY, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.sync import make_manifest

SPEC = {
    **PATH,
    **VERIFY,
    "id": {"type": "str"},
    "layout": {"type": "str", "default": "data", "choices": ["data", "files"]},
    "refresh": {"type": "bool", "default": False},
}


def main() -> None:
    run_module(make_manifest, SPEC)


if __name__ == "__main__":
    main()
