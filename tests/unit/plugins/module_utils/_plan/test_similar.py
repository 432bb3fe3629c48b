# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Estimates of a result from finished trainings."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import similar
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import planned

PLAN = planned({})
TOKENS, BATCH = PLAN["training"]["tokens"], PLAN["training"]["total_batch"]
EVALS = [[0.5, 1.5], [1.0, 1.2]]


def finished(run: str = "old", times: float = 1.0, bits: float = 1.2, **more: Any) -> dict[str, Any]:
    told = {"run": run, "training": "a" * 16, "lineage": lineage.of_plan(PLAN), "tokens": round(times * TOKENS)}
    sizes = {"total_batch": BATCH, "eval_tokens": PLAN["training"]["eval_tokens"]}
    return {**told, **sizes, "evals": [EVALS[0], [1.0, bits]], **more}


def found(*past: dict[str, Any], training: str = "") -> list[similar.Similar]:
    plan_hosts = [similar.Host("a", None, {"finished": list(past)}), similar.Host("b", None, {})]
    return similar.similar(plan_hosts, PLAN, training)


def test_expected_result_is_that_of_about_as_many_tokens_and_names_its_run():
    said = similar.expected(PLAN, found(finished(times=1.2)))
    assert "about 1.2 bits per byte" in said
    assert "old ended at 1.2000 after" in said
    assert similar.expected(PLAN, found(finished(times=1.6))) == ""
    assert similar.expected(PLAN, []) == ""


def test_between_two_it_follows_a_power_of_the_tokens():
    said = similar.expected(PLAN, found(finished("few", 0.25, 1.6), finished("many", 4.0, 0.9)))
    assert "about 1.2 bits per byte" in said
    assert similar.expected(PLAN, found(finished("few", 0.25, 1.6), finished("many", 5.0, 0.9))) == ""
    assert "few ended at 1.6000" in said and "many ended at 0.9000" in said


def test_course_is_that_of_the_nearest_with_the_same_batch():
    past = [finished("far", 1.4), finished("near", 0.9), finished("other", total_batch=2 * BATCH)]
    assert similar.course(PLAN, found(*past)) == {"run": "near", "evals": EVALS}
    assert similar.course(PLAN, found(finished(times=1.6))) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"training": "b" * 16},
        {"eval_tokens": 7},
        {"lineage": {**lineage.of_plan(PLAN), "model": {"depth": 5}}},
        {"lineage": {**lineage.of_plan(PLAN), "data": {}}},
        {"evals": []},
        {"evals": [[1.0]]},
        {"tokens": 0},
    ],
)
def test_itself_another_model_other_data_and_nonsense_are_left_out(wrong: dict[str, Any]):
    assert found(finished(), training="b" * 16)
    assert not found(finished(**wrong), training="b" * 16)
