# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.action.shard_sync import total_bytes
from ansible_collections.nanochat.ddp.plugins.plugin_utils._growth import growth_text, quoted


@pytest.mark.parametrize(
    ("size", "total", "text"),
    [
        (412_000_000, 0, "412 MB"),
        (412_000_000, 1_200_000_000, "412 MB of 1.2 GB (34 %)"),
        # What is there besides is no part of it, and it is not over before the module says so.
        (1_300_000_000, 1_200_000_000, "1.2 GB of 1.2 GB (99 %)"),
    ],
)
def test_how_much_has_arrived(size: int, total: int, text: str) -> None:
    assert growth_text(size, total) == text


@pytest.mark.parametrize(
    ("manifest", "total"),
    [
        (None, 0),
        ({}, 0),
        ({"format": 1, "id": "x", "shards": [{"name": "a", "bytes": 5}], "tokenizer": [{"name": "b", "bytes": 7}]}, 12),
    ],
)
def test_what_a_manifest_comes_to(manifest: Any, total: int) -> None:
    assert total_bytes(manifest) == total


def test_a_home_folder_is_that_of_the_host() -> None:
    assert quoted("~/my data") == "\"$HOME\"/'my data'"
    assert quoted("/x y") == "'/x y'"
