#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_fetch
short_description: Download numbered shards of a collection
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Downloads what is missing or broken of the first O(shards) files of a collection and of its last one, which is
    validation.
  - Downloads resume where they were cut; a truncated or corrupted file is downloaded again.
extends_documentation_fragment:
  - nanochat.ddp.shards
  - nanochat.ddp.shards.verify
options:
  url:
    description: The base URL of files named C(shard_00000.parquet) and so on.
    type: str
    required: true
  shards:
    description: How many shards to take, the last one of the collection among them. V(0) takes all.
    type: int
    default: 0
  last_shard:
    description: The number of the collection's last shard.
    type: int
    default: 6542
  manifest:
    description: A manifest with the digests that files have to have; by default the folder's own, if it has one.
    type: dict
  retries:
    description: How many times a file is tried; the pauses between the tries double.
    type: int
    default: 6
  parallel:
    description: How many files move at the same time.
    type: int
    default: 3
"""

EXAMPLES = r"""
- name: Download the shards
  nanochat.ddp.shard_fetch:
    path: /mnt/data/nanochat/data/climbmix
    url: https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main
    shards: 8
"""

RETURN = r"""
moved:
  description: Files that were (in check mode, would be) brought here.
  returned: success
  type: list
  elements: str
bytes:
  description: How much was (in check mode, would be) brought here.
  returned: success
  type: int
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
seconds:
  description: How long it took.
  returned: success
  type: float
"""

from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import PATH, VERIFY, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.sync import fetch

SPEC = {
    **PATH,
    **VERIFY,
    "url": {"type": "str", "required": True},
    "shards": {"type": "int", "default": 0},
    "last_shard": {"type": "int", "default": 6542},
    "manifest": {"type": "dict"},
    "retries": {"type": "int", "default": 6},
    "parallel": {"type": "int", "default": 3},
}


def main() -> None:
    run_module(
        fetch,
        SPEC,
        bounds={"shards": (0, 1000000), "last_shard": (0, 10000000), "retries": (1, 100), "parallel": (1, 64)},
    )


if __name__ == "__main__":
    main()
