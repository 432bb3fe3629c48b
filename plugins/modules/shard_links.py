#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_links
short_description: Let a run read exactly the files of a manifest
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Makes C(data/) and C(tokenizer/) below O(dest) hold exactly the manifest's files, by hard links into O(path), by
    symbolic ones where that fails. Other files there are removed.
  - Every file is checked against its digest before.
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  manifest:
    description: The manifest; by default the folder's own.
    type: dict
  dest:
    description: The run folder.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Let the run read exactly these shards
  nanochat.ddp.shard_links:
    path: /home/xiaoxin/nanochat/data/books
    dest: /home/xiaoxin/nanochat/runs/d4
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
  description: Names that were (in check mode, would be) linked.
  returned: success
  type: list
  elements: str
extra:
  description: Files that are no part of the manifest; they are removed from the run's folders.
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

from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import PATH, VERIFY, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.sync import link_run

SPEC = {
    **PATH,
    **VERIFY,
    "manifest": {"type": "dict"},
    "dest": {"type": "path", "required": True},
}


def main() -> None:
    run_module(link_run, SPEC)


if __name__ == "__main__":
    main()
