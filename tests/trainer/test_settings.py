# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line: upstream's flags and defaults, and values refused in one sentence."""

from __future__ import annotations

import pytest

from nanochat.kit.common import UserError
from nanochat.kit.settings import parse, rank_shares, shared_config

UPSTREAM_DEFAULTS = {
    "run": "dummy", "device_type": "", "depth": 20, "aspect_ratio": 64, "head_dim": 128, "max_seq_len": 2048,
    "window_pattern": "SSSL", "num_iterations": -1, "target_flops": -1, "target_param_data_ratio": 12,
    "device_batch_size": 32, "total_batch_size": -1, "embedding_lr": 0.3, "unembedding_lr": 0.008,
    "weight_decay": 0.28, "matrix_lr": 0.02, "scalar_lr": 0.5, "warmup_steps": 40, "warmdown_ratio": 0.65,
    "final_lr_frac": 0.05, "resume_from_step": -1, "eval_every": 250, "eval_tokens": 80 * 524288,
    "core_metric_every": 2000, "core_metric_max_per_task": 500, "sample_every": 2000, "save_every": -1, "model_tag": None,
}  # fmt: skip


def test_defaults_are_upstreams() -> None:
    assert {name: getattr(parse([]), name) for name in UPSTREAM_DEFAULTS} == UPSTREAM_DEFAULTS


def test_a_command_line_as_people_type_it() -> None:
    line = (
        "--depth=4 --head-dim 64 --max-seq-len=512 --device-batch-size=2 --total-batch-size=2048 --model-tag d4-smoke"
    )
    settings = parse(f"{line} --core-metric-every=-1 --target-flops 1e18 --rank-rows 3,1 --resume".split())
    assert (settings.depth, settings.head_dim, settings.tag) == (4, 64, "d4-smoke")
    assert (settings.target_flops, settings.rank_rows, settings.resume) == (1e18, (3, 1), True)
    assert parse(["--depth", "8"]).tag == "d8"
    # Upstream's ways to say never.
    parse(
        [
            "--eval-every=0",
            "--sample-every=0",
            "--save-every=0",
            "--core-metric-every=999999",
            "--core-metric-max-per-task=-1",
        ]
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--core-metric-every -2", "--core-metric-every -2: must be at least -1"),
        ("--depth 0", "--depth 0: must be at least 1"),
        ("--depth 1 --aspect-ratio 8 --head-dim 8", "is too narrow"),
        ("--head-dim 63", "--head-dim 63: must be even"),
        ("--window-pattern SXL", "--window-pattern SXL"),
        ("--matrix-lr nan", "--matrix-lr nan: is not a finite number"),
        ("--matrix-lr -1", "--matrix-lr -1.0: must be at least 0"),
        ("--warmdown-ratio 1.5", "--warmdown-ratio 1.5: must be at most 1"),
        ("--save-every -2", "--save-every -2: must be at least -1"),
        ("--keep-checkpoints 0", "--keep-checkpoints 0: must be at least 1, or -1"),
        ("--target-param-data-ratio 0", "the training length is undefined"),
        ("--num-iterations 5 --target-param-data-ratio 0", "--target-param-data-ratio 0.0: must be more than 0"),
        ("--resume --resume-from-step 5", "cannot be combined with --resume"),
        ("--model-tag ../elsewhere", "--model-tag ../elsewhere"),
        ("--rank-rows 2,x", '"2,x" is not a list of numbers by rank'),
        ("--rank-rows 2,0", "--rank-rows 2,0"),
        ("--timeout-seconds 0", "--timeout-seconds"),
        ("--sync fast", "exact"),
        ("--dept 4", "unrecognized arguments: --dept 4"),
        ("--depth four", "invalid int value: 'four'"),
    ],
)
def test_what_cannot_work_is_refused_naming_the_flag(line: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(line.split())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("extra", "batch", "world", "found"),
    [
        ("", 4096, 2, [4, 4]),
        ("--rank-rows 5,3", 4096, 2, [5, 3]),
        ("", 4096, 3, "4096: not divisible by 3072 (--max-seq-len 512 * --device-batch-size 2 * 3 rank(s))"),
        ("", 2000, 1, "--total-batch-size 2000: not a whole number of rows"),
        ("--rank-rows 6,2", 4096, 3, "names 2 rank(s), but this job has 3"),
        ("--rank-rows 6,4", 4096, 2, "adds up to 10 row(s), but a step of 4096 tokens has 8"),
    ],
)
def test_rows_are_shared_out_evenly_or_as_told_where_that_can_be(extra, batch, world, found) -> None:
    settings = parse(["--max-seq-len", "512", "--device-batch-size", "2", *extra.split()])
    if isinstance(found, list):
        assert rank_shares(settings, batch, world) == found
        return
    with pytest.raises(UserError) as refused:
        rank_shares(settings, batch, world)
    assert found in str(refused.value)


def test_field_09_ranks_may_differ_in_their_folder_only() -> None:
    here, there = parse(["--run-dir", "/a"]), parse(["--run-dir", "/b"])
    assert shared_config(here) == shared_config(there)
    assert shared_config(here) != shared_config(parse(["--matrix-lr", "0.03"]))
