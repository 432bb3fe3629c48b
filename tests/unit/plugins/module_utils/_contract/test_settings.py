# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads settings from inventory variables."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError, sentence
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import resolve


def refusal(*hosts: dict[str, Any]) -> list[str]:
    names = ["desktop", "laptop", "attic"]
    with pytest.raises(PlanError) as caught:
        resolve(list(zip(names, hosts)))
    return [sentence(found) for found in caught.value.findings]


def test_a_given_setting_wins_over_the_profile_and_an_empty_one_does_not():
    run = resolve(
        [("desktop", {"ddp_profile": "real", "ddp_depth": 12, "ddp_iterations": None, "ddp_sequence": ""})]
    ).run
    assert (run.depth, run.iterations, run.sequence) == (12, 5000, 1024)


def test_words_of_the_command_line_become_numbers_and_truths():
    given = {
        "ddp_depth": "8",
        "ddp_fresh": "yes",
        "ddp_extra_args": '["--warmup-steps=5"]',
        "ddp_data_paths": "['/srv/x', '/y']",
        "watch": "false",
        # Facts of the collection and other variables are left alone.
        "ddp_probe": {},
        "ansible_host": "x",
    }
    run = resolve([("desktop", given)]).run
    assert (run.depth, run.fresh, run.watch) == (8, True, False)
    assert (run.extra_args, run.data_paths) == (("--warmup-steps=5",), ("/srv/x", "/y"))


GONE = "is no longer a setting: "


@pytest.mark.parametrize(
    ("name", "ignored", "value", "said"),
    [
        ("ddp_device", ["cpu", "CPU", "auto", None, "", " "], "cuda", GONE + "training is on CPUs. Remove it."),
        ("ddp_dtype", ["auto", "float32"], "bfloat16", GONE + "numbers are float32."),
        ("ddp_trainer_join", [True, "true"], False, GONE + "the collection trains with its own trainer"),
        ("ddp_trainer_source", ["ours", ""], "~/nanochat", GONE + "the collection has its own trainer"),
        ("ddp_quiet_minutes", [1, 10], 5, GONE + "a guest comes back after one quiet minute"),
        ("ddp_battery_limit", [100], 30, GONE + "a guest leaves as soon as it is on battery"),
        ("ddp_port_range", [""], "40000-40999", GONE + "the data ports are a host's own local ports"),
        ("ddp_rebalance", ["true"], False, "ddp_batch_split equal or threads keeps them"),
        ("ddp_torch_index", ["auto"], "default", "ddp_torch 2.13.0+cuda accepts a CUDA build"),
    ],
)
def test_what_went_is_ignored_if_it_asks_for_nothing_else_and_refused_with_what_to_do(name, ignored, value, said):
    for one in ignored:
        assert resolve([("desktop", {name: one})]).run == resolve([("desktop", {})]).run
    (problem,) = refusal({name: value}, {name: value})
    assert problem.startswith(name) and "on every host" in problem and said in problem
