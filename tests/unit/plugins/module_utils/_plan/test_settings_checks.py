# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings that do not go together are refused, with what would."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    hosts,
    refusal,
)

MLFLOW = {"ddp_tracker": "mlflow"}


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ({"ddp_total_batch": 3000}, "ddp_total_batch 3000 is not a multiple of"),
        ({"ddp_head_dim": 63}, "ddp_head_dim is 63; it must be even"),
        ({"ddp_depth": 1, "ddp_aspect_ratio": 4, "ddp_head_dim": 8}, "makes a model 8 wide; it must be at least 24"),
        (
            {"ddp_depth": 3, "ddp_aspect_ratio": 10, "ddp_head_dim": 10, "ddp_sync": "int8"},
            "a model 30 wide cannot be divided into blocks of 16; use exact or bf16",
        ),
        ({"ddp_eval_every": 0}, "ddp_eval_every is 0; it must be at least 1, or -1 for none."),
        ({"ddp_keep_checkpoints": 0}, "ddp_keep_checkpoints is 0; it must be at least 1, or -1 for all."),
        ({"ddp_data_source": "host"}, "ddp_data_source is host, but ddp_data_paths is empty"),
        ({"ddp_secret_env": {"A": "x\0"}}, "ddp_secret_env cannot be passed on: the value of A contains a NUL byte"),
        ({"ddp_extra_env": {"PWD": "/x"}}, "ddp_extra_env cannot be passed on: PWD cannot be set"),
        ({"ddp_extra_env": {"A": "x" * 140000}}, "ddp_extra_env cannot be passed on: A is 140002 bytes long"),
        ({"ddp_data_paths": ["texts"]}, "ddp_data_paths holds 'texts'; it must be an absolute path"),
        ({"ddp_data_source": "controller"}, "it must name the folder of shards on the controller"),
        (
            {"ddp_data_source": "controller", "ddp_data_paths": ["/a", "/b", "/c"]},
            "ddp_data_paths names 3 folders, but",
        ),
        ({"ddp_data_host": "lptop"}, "ddp_data_host is lptop, which is not a host of this job; use desktop or laptop."),
        ({"ddp_matmul": "bf16"}, "ddp_matmul is bf16, but the CPU of desktop and laptop has no instructions for it"),
        (
            {"ddp_extra_env": {"NANOCHAT_PROM_DIR": "/x"}},
            "ddp_extra_env sets NANOCHAT_PROM_DIR, but ranks write no file for Prometheus any more. Read metrics-rankN.jsonl",
        ),
        ({"ddp_extra_env": {"RANK": "1"}}, "ddp_extra_env sets RANK, which torchrun sets itself"),
        ({"ddp_secret_env": {"NANOCHAT_DATA_DIR": "/x"}}, "sets NANOCHAT_DATA_DIR, which the plan sets itself"),
        ({"ddp_extra_args": ["--depth=9"]}, "ddp_extra_args holds --depth, which the plan sets itself"),
        ({"ddp_head": "whole", "ddp_trainer_source": "/home/me/nanochat"}, "only this collection's trainer supports"),
        ({"ddp_restarts": 3, "ddp_min_hosts": 3}, "ddp_min_hosts is 3, but this job has 2 hosts"),
        ({"ddp_min_hosts": 1}, "ddp_min_hosts is set, but ddp_restarts is 0"),
        ({"ddp_restarts": 3, "ddp_resume": False}, "ddp_restarts needs ddp_resume"),
        ({"ddp_restarts": 3, "ddp_keeper_port": 29500}, "ddp_keeper_port and ddp_port are both 29500"),
        ({**MLFLOW, "ddp_tracker_port": 29500}, "ddp_tracker_port and ddp_port are both 29500; they must differ."),
        (
            {**MLFLOW, "ddp_tracker_port": 29501, "ddp_restarts": 3},
            "ddp_keeper_port and ddp_tracker_port are both 29501",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(run, sentence):
    (problem,) = refusal(hosts(run))
    assert sentence in problem


def test_more_shards_than_the_collection_has_are_refused():
    said = refusal(hosts({"ddp_data_source": "url", "ddp_data_shards": 6544}))
    assert any("ddp_data_shards is 6544, but the collection has 6543; use that or fewer." in one for one in said)
