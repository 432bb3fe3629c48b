# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prediction against figures that were measured, and the advice that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import step_model
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_memory import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, PredictedStep, Speed, job_of
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import predict
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import ModelConfig
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import WAYS

D4 = ModelConfig.from_depth(4, 64, 64, 512, 32768)
D8 = ModelConfig.from_depth(8, 64, 128, 1024, 32768)
GIGABIT = Link(940.0, 0.2)


HOSTS = ("desktop", "laptop")


def plan(
    shape: ModelConfig = D4,
    sync: str = "exact",
    rows: tuple[int, ...] = (2, 2),
    hosts: Sequence[str] = HOSTS,
    **training: Any,
) -> dict[str, Any]:
    fixed = {"total_batch": sum(rows) * shape.sequence_len, "device_batch": 2, "sync": sync, "iterations": 1000}
    fixed |= {"head": "whole", "head_open": False, "asked": {"sync": sync, "head": "whole"}, "batch_split": "equal"}
    return {
        "run": "d4",
        "world": len(rows),
        "master": {"host": hosts[0]},
        "model": describe(shape, 64),
        "training": {**fixed, **training},
        "nodes": [
            {"host": host, "rank": rank, "rows": share, "address": f"192.168.1.{10 + rank}"}
            for rank, (host, share) in enumerate(zip(hosts, rows))
        ],
    }


def speeds(*pass_seconds: float) -> list[Speed]:
    return [Speed(host, seconds, 0.02, 0.1) for host, seconds in zip(HOSTS, pass_seconds)]


def step_of(document: dict[str, Any], each: list[Speed], link: Link | None, kind: str | None = None) -> PredictedStep:
    """A step with the plan's rows."""
    job = job_of(document)
    return step_model.predict(job.under(kind or job.sync), each, link)


def megabytes_sent(document: dict[str, Any]) -> float:
    return sum(step_model.bytes_sent(job_of(document))) / 1e6


@pytest.mark.parametrize(
    ("shape", "sync", "head", "megabytes"),
    [
        (D4, "exact", "whole", 47),
        (D4, "int8", "whole", 12.8),
        (D4, "int4", "whole", 6.5),
        (D8, "exact", "whole", 175),
        # Hidden states instead of the head's gradient.
        (D4, "exact", "shared", 16.8),
        (D8, "bf16", "shared", 61),
    ],
)
def test_bytes_of_a_step_are_those_that_were_measured(shape, sync, head, megabytes):
    assert megabytes_sent(plan(shape, sync, head=head)) == pytest.approx(megabytes, rel=0.06)


# A step of two nodes with a core each over a link of so many Mbit/s, as bench/two_nodes.py measured it on a quiet machine
# (lab/performance.md): a node's pass, AdamW and Muon come to the step alone.
FIGURES = [
    (D4, Speed("", 0.410, 0.020, 0.060), 1000, {"exact": 0.600, "bf16": 0.527}),
    (D4, Speed("", 0.430, 0.022, 0.063), 100, {"exact": 4.260, "bf16": 2.201}),
    (D8, Speed("", 2.80, 0.11, 1.10), 1000, {"exact": 3.65, "bf16": 3.45}),
    (D8, Speed("", 3.10, 0.13, 1.20), 100, {"exact": 16.7, "bf16": 9.1}),
]


@pytest.mark.parametrize(("shape", "one", "mbit", "measured_seconds"), FIGURES)
def test_field_16_a_step_is_expected_as_it_was_measured(shape, one, mbit, measured_seconds):
    # Of the rate of a line what TCP has, as a rehearsal measures it.
    link = Link(0.957 * mbit, 0.1)
    for kind, seconds in measured_seconds.items():
        step = step_of(plan(shape, kind), [one._replace(host=host) for host in HOSTS], link)
        assert step.seconds == pytest.approx(seconds, rel=0.1), kind


def test_parts_of_the_head_make_up_for_rows_that_are_coarser_than_the_speeds():
    document, each = plan(rows=(3, 1)), speeds(0.5, 1.0)
    rows_alone = step_of(document, each, None)
    of_head = 6 * document["model"]["parameters"]["lm_head"] / document["model"]["flops_per_token"]
    slow = 1000 * (1 / 3 - (1 - of_head) / 4) / of_head
    document["training"] |= {"rows": [3, 1], "head_shares": [round(1000 - slow), round(slow)]}
    step = step_of(document, each, None)
    # Four rows in passes of two at two passes a second and one: two thirds of a second, by rows alone three quarters.
    assert rows_alone.seconds - step.seconds == pytest.approx(0.75 - 2 / 3, abs=0.01)


def advised(document: dict[str, Any], each: list[Speed], link: Link) -> dict[str, dict[str, Any]]:
    """The advice for a plan, by code."""
    predicted = predict.outlook(document, each, lambda hosts: link)
    return {one["code"]: one for one in predict.advice(document, predicted)}  # type: ignore[misc]


def test_field_16_a_link_that_does_not_pay_is_told_with_the_host_to_train_on():
    document, each, link = plan(), speeds(0.5, 0.5), Link(20.0, 3.0)
    assert predict.outlook(document, each, lambda hosts: link)["gain"] < 1
    assert "-e target=desktop" in advised(document, each, link)["not-worth-it"]["remedy"]
    # Nobody is told to leave a machine that is the only one.
    for node in document["nodes"]:
        node["address"] = "127.0.0.1"
    assert predict.outlook(document, each, lambda hosts: link)["gain"] < predict.PAYS
    assert "not-worth-it" not in advised(document, each, link)


@pytest.mark.parametrize(
    ("mbit", "sync", "batch"),
    [(9400.0, "exact", None), (940.0, "exact", None), (10.0, "int4", 1048576), (0.01, "int4", None)],
)
def test_the_batch_that_hides_the_transfers_of_a_slow_link_is_named(mbit, sync, batch):
    document, each = plan(sync=sync), speeds(0.5, 0.5)
    predicted = predict.outlook(document, each, lambda hosts: Link(mbit, 1.0))
    assert predicted["batch"] == batch
    told = f"a step of 2048 tokens is too short to hide what it sends over this link; ddp_total_batch {batch} would"
    assert (told in predict.prediction_text(document, predicted)) is bool(batch)


def test_the_prediction_stands_beside_what_happened():
    document = plan()
    predicted = predict.outlook(document, speeds(1.0, 1.2), lambda hosts: GIGABIT)
    speed = predicted["tokens_per_second"] * 0.9
    run = {"tokens_per_second_mean": speed, "wait_seconds": 30.0, "steps_counted": 100, "bytes_sent": 47_000_000}
    shown = predict.prediction_text(document, predicted)
    assert all(word in shown for word in (*HOSTS, "all together", "times desktop alone", "MB from each host"))
    text = predict.comparison_text(predicted, {"desktop": run, "laptop": run})
    assert "(-10%)" in text
    assert "300 ms" in text
    assert "sent 47.0 MB" in text
    assert not predict.comparison_text(predicted, {"desktop": {**run, "steps_counted": 1}})


def test_a_machine_with_other_work_is_named_instead_of_a_difference():
    document = plan()
    predicted = predict.outlook(document, speeds(1.0, 1.2), lambda hosts: GIGABIT, busy=["desktop"])
    run = {"tokens_per_second_mean": 100.0, "wait_seconds": None, "steps_counted": 9, "load": 1.1}
    text = predict.comparison_text(predicted, {"desktop": run, "laptop": {**run, "load": 4.2}})
    assert "%" not in text.splitlines()[0]
    assert "desktop had other work during the rehearsal and laptop had other work while it trained" in text
    assert "laptop" not in predict.comparison_text(predicted, {"desktop": run}).splitlines()[0]


def auto(document: dict[str, Any], taken: str = "exact") -> dict[str, Any]:
    document["training"].update(sync=taken, head="shared", head_open=True, asked={"sync": "auto", "head": "auto"})
    return document


def test_auto_takes_what_rounds_least_of_what_the_link_hides():
    both = speeds(1.0, 1.0)
    taken = [step_model.choose_sync(job_of(auto(plan())), both, Link(mbit, 0.2)) for mbit in (9400.0, 940.0, 30.0, 3.0)]
    order = [list(WAYS).index(way) for way in taken]
    assert order[0] == 0
    assert order == sorted(order)
    assert order[-1] == len(WAYS) - 1
    steps = {way: step_of(auto(plan()), both, Link(30.0, 0.2), way).seconds for way in WAYS}
    assert steps[taken[2]] * step_model.NEARLY_AS_FAST <= min(steps.values())


def test_why_auto_took_a_way_is_told():
    one, slow = speeds(0.4, 0.4), Link(30.0, 0.3)
    document = auto(plan())
    best = predict.outlook(document, one, lambda hosts: slow)["auto_sync"]
    assert best != "exact"
    text = predict.prediction_text(document, predict.outlook(document, one, lambda hosts: slow))
    assert f"ddp_sync auto is exact in this plan, and {best} in a new run" in text and f"-e ddp_sync={best}" in text
    document = auto(plan(), best)
    text = predict.prediction_text(document, predict.outlook(document, one, lambda hosts: slow))
    assert f"ddp_sync auto is {best}" in text
    assert f"{best} (auto)" in text
    document = auto(plan())
    assert "auto is exact" in predict.prediction_text(
        document, predict.outlook(document, one, lambda hosts: Link(9400.0, 0.1))
    )
    assert predict.outlook(plan(), one, lambda hosts: slow)["auto_sync"] is None


@pytest.mark.parametrize(
    ("shape", "world", "messages"),
    # Those of the trainer: 13 matrices at depth 2, 26 at depth 4, whose head of 33.6 MB has nine blocks.
    [(ModelConfig.from_depth(2, 64, 64, 128, 4096, "L"), 2, 13 + 2 + 1 + 2), (D4, 2, 26 + 3 + 8 + 2)],
)
def test_each_message_of_a_step_costs_both_ends_time_that_nothing_hides(shape, world, messages):
    document = plan(shape, rows=(2,) * world)
    both = speeds(0.3, 0.3)
    plain, late = (step_of(document, both, Link(1000.0, 0.1, ms)) for ms in (0.0, 0.05))
    assert late.seconds - plain.seconds == pytest.approx(messages * step_model.MESSAGE_COST * 0.05e-3)


def test_the_head_is_shared_out_or_not_with_each_way_by_itself():
    document = auto(plan(rows=(24, 24)))
    document["training"]["head"] = "whole"
    heads = {"exact": "whole", "bf16": "shared", "int8": "whole", "int4": "whole"}
    assert {way: job_of(document).under(way).head for way in heads} == heads
    document["training"]["head_open"] = False
    assert job_of(document).under("bf16").head == "whole"


def test_a_measured_step_is_kept_with_its_link_and_model():
    document = plan()
    links = [{"bandwidth_mbit": 93.0, "latency_ms": 0.4}]
    gloo = {"stdout": '{"ok": true, "bandwidth_mbit": 80.0, "message_ms": 0.4}'}
    kept = predict.with_link({"key": "k"}, document, links, gloo)
    assert kept["link"] == {"mbit": 93.0, "latency_ms": 0.4, "message_ms": 0.4}
    assert step_model.links_of([kept, {**kept, "link": {"mbit": 94.0, "latency_ms": 0.1}}]) == Link(93.0, 0.4, 0.4)
    assert (kept["model"], kept["device_batch"]) == (document["model"], 2)
    assert "link" not in predict.with_link({}, document, [], {})


# Without one of the hosts

CABLE, RADIO = Link(940.0, 0.2), Link(25.0, 4.0)


def without(rows: dict[str, int], each: list[Speed], radio: str = "") -> dict[str, float]:
    """The others' speed without each host, in a home where some are on Wi-Fi."""
    document = plan(rows=tuple(rows.values()), hosts=list(rows), batch_split="auto", head="whole")
    return predict.without_each(document, job_of(document), each, lambda hosts: RADIO if {*hosts} & {*radio} else CABLE)


def speeds_of(**seconds: float) -> list[Speed]:
    return [Speed(host, one, 0.02, 0.1) for host, one in seconds.items()]


def test_without_one_of_three_the_rest_is_what_a_plan_of_two_expects():
    each = speeds_of(a=0.5, b=1.0, c=1.0)
    found = without({"a": 6, "b": 3, "c": 3}, each)
    two = step_of(plan(rows=(8, 4), hosts="ab"), each[:2], CABLE)
    assert found["c"] == pytest.approx(two.tokens_per_second, rel=1e-3)
    assert found["a"] < found["b"] == found["c"]
    # It waits for its own links only.
    assert (
        without(dict.fromkeys("abc", 4), each, radio="c")["c"] > 1.5 * without(dict.fromkeys("abc", 4), each, "c")["b"]
    )
