# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fine-tuning: a run of its own, which begins with the model of another one."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan, read
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import render
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judgements.plan import seen_on_the_controller
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, planned, refusal

TALKS = {"path": "/talks.jsonl", "sha256": "ab" * 32, "count": 7}
HERE = {"conversations": TALKS}


def having_trained(stage: str, where: tuple[str, ...] = ("desktop", "laptop"), **settings: Any) -> list[dict[str, Any]]:
    """Two hosts on which a base model was trained under the settings of the profile."""
    base = planned()
    known = hosts({"ddp_stage": stage, **settings})
    for host in known:
        steps = [5, 10] if host["name"] in where else []
        host["probe"]["base_run"] = {"checkpoints": steps, "lineage": lineage.of_plan(base) if steps else {}}
    return known


def refused(known: list[dict[str, Any]], here: dict[str, Any] | None = None) -> str:
    return " ".join(refusal(known, here=here or HERE))


def test_without_held_out_conversations_nothing_is_evaluated_and_other_ones_are_no_reason_to_begin_again():
    held_out = {**TALKS, "path": "/held.jsonl", "count": 3}
    known = having_trained("sft", ddp_sft_val_data="/held.jsonl")
    plan = make_plan(known, here={**HERE, "held_out": held_out}).plan
    without = make_plan(having_trained("sft"), here=HERE).plan
    assert "evaluation every 250" in render(plan)
    assert "no evaluation" in render(without) and "evaluates" not in render(without)
    assert lineage.differences(plan, without) == []


def test_what_was_begun_goes_on_without_its_base_model_but_not_with_other_conversations():
    known = having_trained("sft")
    begun = make_plan(known, here=HERE).plan
    for host in known:
        host["probe"]["base_run"] = {"checkpoints": [], "lineage": {}}
        host["probe"]["run"].update(checkpoints=[30], lineage=lineage.of_plan(begun))
    assert make_plan(known, here=HERE).plan["digest"] == begun["digest"]
    other = {"conversations": {**TALKS, "sha256": "cd" * 32}}
    assert "the SHA-256 of ddp_sft_data was abababab and is cdcdcdcd now" in refused(known, other)


def test_conversations_are_judged_on_the_controller(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(good) + "\n{\n" + json.dumps(good[:1]) + "\n")

    def told(**settings: str) -> str:
        known = having_trained("sft", **settings)
        return refused(known, seen_on_the_controller(read(known).run))

    broken = told(ddp_sft_data="talks.jsonl")
    assert f"{path}, line 2: it is not JSON" in broken and f"{path}, line 3: it must be a list of" in broken
    path.write_text(json.dumps(good) * 2)
    assert f"ddp_sft_val_data: {path}, line 1: it is not JSON" in told(ddp_sft_val_data=str(path))
    assert "ddp_sft_data: /none cannot be read on the controller" in told(ddp_sft_data="/none")
    demo = seen_on_the_controller(read(having_trained("sft")).run)
    assert demo["conversations"]["count"] > 30 and demo["obstacles"] == [] and "held_out" not in demo
