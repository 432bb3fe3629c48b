# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counted parameters and FLOPs against sizes of the reference implementation."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._rules import model_size
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import ModelConfig

D4 = ModelConfig.from_depth(4, 64, 64, 512, 32768)
D8 = ModelConfig.from_depth(8, 64, 128, 1024, 32768)
D12 = ModelConfig.from_depth(12, 64, 128, 2048, 32768)

SIZES = [
    (D4, (8388608, 16777216, 8388608, 3145824, 34, 36700290), 71959248, [128, 128, 128, 512]),
    (D8, (16777216, 67108864, 16777216, 25166016, 42, 125829354), 273679632, [256, 256, 256, 1024] * 2),
    (D12, (25165824, 150994944, 25165824, 84935088, 50, 286261730), 759696048, [512, 512, 512, 2048] * 3),
    (ModelConfig.from_depth(3, 43, 64, 64, 512, "L"), (98304, 196608, 98304, 1327176, 32, 1720424), None, [64] * 3),
]


@pytest.mark.parametrize(("shape", "counts", "flops", "windows"), SIZES, ids=["d4", "d8", "d12", "rounded"])
def test_field_15_parameters_are_counted(shape, counts, flops, windows):
    names = ("wte", "value_embeds", "lm_head", "transformer_matrices", "scalars", "total")
    assert model_size.parameters(shape) == dict(zip(names, counts))
    assert model_size.windows(shape) == windows
    if flops:
        assert model_size.flops_per_token(shape) == flops
