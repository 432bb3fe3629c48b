#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_import
short_description: Take shards and a tokenizer of a folder of the same host by links
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Gives the chosen shards of an existing folder, and its tokenizer, a second name in O(path); nothing is copied where
    links are possible.
  - Once O(path) has a manifest, that says what belongs to the data set, whatever the source holds today.
extends_documentation_fragment:
  - nanochat.ddp.shards
options:
  source:
    description: The folder that holds the shards.
    type: path
    required: true
  tokenizer:
    description: The folder of the tokenizer; by default C(tokenizer) in or beside O(source).
    type: path
  shards:
    description:
      - How many shards to take, the last one of the folder among them, which is validation. V(0) takes all.
    type: int
    default: 0
"""

EXAMPLES = r"""
- name: Take eight of the shards that this host has
  nanochat.ddp.shard_import:
    path: /mnt/data/nanochat/data/books
    source: /srv/books
    shards: 8
"""

RETURN = r"""
files:
  description: The files of the source that belong to the data set; without a tokenizer among them one has to be trained.
  returned: success
  type: list
  elements: str
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
seconds:
  description: How long it took.
  returned: success
  type: float
"""

from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import PATH, run_module
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.sync import import_folder

SPEC = {
    **PATH,
    "source": {"type": "path", "required": True},
    "tokenizer": {"type": "path"},
    "shards": {"type": "int", "default": 0},
}


def main() -> None:
    run_module(import_folder, SPEC, bounds={"shards": (0, 1000000)})


if __name__ == "__main__":
    main()
