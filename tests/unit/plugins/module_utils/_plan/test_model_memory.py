# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory and disk of a model."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import model_memory
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import ModelConfig, parameters

D4 = ModelConfig.from_depth(4, 64, 64, 512, 32768)
D8 = ModelConfig.from_depth(8, 64, 128, 1024, 32768)


@pytest.mark.parametrize("sync", ["int8", "int4"])
def test_packing_keeps_a_copy_of_the_matrices_in_memory_and_checkpoints(sync):
    counts = parameters(D8)
    copy = 4 * (counts["lm_head"] + counts["transformer_matrices"])
    assert model_memory.memory(D8, 2, sync) - model_memory.memory(D8, 2) == copy
    assert model_memory.checkpoint_bytes(D8, sync) - model_memory.checkpoint_bytes(D8) == copy
    # Of a head in parts nothing is left over from packing.
    packed, plain = (model_memory.memory(D8, 2, one, parts_of_head=2) for one in (sync, "exact"))
    assert packed - plain == 4 * counts["transformer_matrices"]


def test_a_checkpoint_holds_weights_and_the_optimizers_state():
    # Measured: 88.8 MB for a model of 7,340,162 parameters.
    small = ModelConfig.from_depth(4, 64, 64, 512, 4096)
    assert model_memory.checkpoint_bytes(small) == pytest.approx(88.8e6, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "device_batch", "measured"),
    [
        (ModelConfig.from_depth(4, 64, 64, 512, 4096), 2, 0.63e9),
        (D4, 2, 1.22e9),
        (D4, 8, 1.54e9),
        (D8, 2, 3.20e9),
    ],
)
def test_field_15_memory_is_near_what_was_measured_and_not_below(shape, device_batch, measured):
    assert measured < model_memory.memory(shape, device_batch) < 1.25 * measured
