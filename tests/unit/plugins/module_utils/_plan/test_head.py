# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the head is shared out: the plan counts as the trainer does."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import head


@pytest.mark.parametrize("tokens", [[1024, 1024], [3072, 1024], [512, 0, 1024], [4096] * 6, [4096] * 8, [262144] * 2])
@pytest.mark.parametrize("sync", head.WIRE_BYTES)
def test_the_plan_counts_as_the_trainer(trainers_own: Any, tokens: list[int], sync: str) -> None:
    theirs, world, element = trainers_own("head_parts"), len(tokens), head.WIRE_BYTES[sync][1]
    assert theirs.ELEMENTS == head.WIRE_BYTES
    assert head.whole_bytes(32768, 512, world, element) == theirs.whole_bytes(32768, 512, world, element)
    for rank in range(world):
        assert head.shared_bytes(tokens, 512, rank, element) == theirs.shared_bytes(tokens, 512, rank, element)
    shared = theirs.sharing_saves(32768, tokens, 512, sync)
    assert head.choose("auto", True, 32768, 512, tokens, sync) == ("shared" if shared else "whole")


def test_what_was_asked_for_counts_where_it_can_be_had() -> None:
    assert head.choose("shared", True, 32768, 512, [262144, 262144], "exact") == "shared"
    assert head.choose("whole", True, 32768, 512, [1024, 1024], "exact") == "whole"
    assert head.choose("shared", False, 32768, 512, [1024, 1024], "exact") == "whole"
    assert head.choose("shared", True, 32768, 512, [1024], "exact") == "whole"


@pytest.mark.parametrize(("device", "sync"), [("cuda", "exact"), ("cpu", "dense")])
def test_only_cpus_that_do_not_send_gradients_whole_can_share(device: str, sync: str) -> None:
    assert head.can_share("cpu", "bf16")
    assert not head.can_share("cpu", "exact", ours=False)
    assert not head.can_share(device, sync)
