# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed of the others without each host."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, Speed, job_of, predict
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import predict as prediction
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.rates import slowest_between
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.without_host import without_each
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape

D4 = Shape(4, 256, 64, 512, "L", 32768)
CABLE, RADIO = Link(940.0, 0.2), Link(25.0, 4.0)


def plan(rows: dict[str, int], split: str = "auto") -> dict[str, Any]:
    shape = describe(D4)
    training = {"total_batch": sum(rows.values()) * 512, "device_batch": 2, "sync": "exact", "head": "whole"}
    nodes = [
        {"host": host, "rank": rank, "rows": share, "address": f"192.168.1.{10 + rank}"}
        for rank, (host, share) in enumerate(rows.items())
    ]
    return {
        "run": "d4",
        "world": len(rows),
        "master": {"host": next(iter(rows))},
        "model": shape,
        "training": {**training, "iterations": 1000, "batch_split": split},
        "nodes": nodes,
    }


def links(hosts: str, radio: str = "") -> dict[str, dict[str, Link]]:
    return {a: {b: RADIO if radio and (a in radio or b in radio) else CABLE for b in hosts if b != a} for a in hosts}


def speeds(**seconds: float) -> list[Speed]:
    return [Speed(host, one, 0.02, 0.1) for host, one in seconds.items()]


def test_without_one_of_two_hosts_the_other_has_all_rows_and_sends_nothing() -> None:
    document, each = plan({"a": 6, "b": 6}), speeds(a=0.5, b=0.5)
    found = without_each(document, each, {}, [6, 6])
    assert found["a"] == pytest.approx(12 * 512 / each[1].alone(6), rel=1e-3)
    assert found == {"a": found["b"], "b": found["b"]}


def test_without_one_of_three_the_rest_is_what_a_plan_of_two_expects() -> None:
    document, each = plan({"a": 6, "b": 3, "c": 3}), speeds(a=0.5, b=1.0, c=1.0)
    found = without_each(document, each, links("abc"), [6, 3, 3])
    two = predict(job_of(plan({"a": 8, "b": 4})), each[:2], CABLE, [8, 4])
    assert found["c"] == pytest.approx(two.tokens_per_second, rel=1e-3)
    assert found["a"] < found["b"] == found["c"]


def test_the_rest_waits_for_its_own_links_only() -> None:
    assert slowest_between(links("abc", "c"), "ab") == CABLE
    assert slowest_between(links("abc", "c"), "abc") == RADIO
    found = without_each(plan(dict.fromkeys("abc", 4)), speeds(a=0.5, b=0.5, c=0.5), links("abc", "c"), [4] * 3)
    assert found["c"] > 2 * found["a"]


def test_what_is_not_known_is_not_told() -> None:
    each = speeds(a=0.5, b=0.5, c=0.5)
    assert without_each(plan(dict.fromkeys("abc", 4)), each, {}, [4] * 3) == {}
    only_of_a = without_each(plan(dict.fromkeys("abc", 4)), each, {"b": {"c": CABLE}}, [4] * 3)
    assert list(only_of_a) == ["a"]
    document = plan(dict.fromkeys("abc", 4))
    document["nodes"][1]["address"] = document["nodes"][2]["address"]
    assert list(without_each(document, each, links("abc"), [4] * 3)) == ["a"]


def test_equal_shares_stay_equal_unless_they_follow_the_speeds() -> None:
    each, document = speeds(a=0.25, b=0.5, c=1.0), plan(dict.fromkeys("abc", 4), "equal")
    fixed = without_each(document, each, links("abc"), [4] * 3)["a"]
    document["training"]["batch_split"] = "speed"
    assert without_each(document, each, links("abc"), [4] * 3)["a"] > 1.05 * fixed


def test_the_prediction_has_a_column_for_it() -> None:
    document = plan(dict.fromkeys("abc", 8))
    predicted = prediction.outlook(document, speeds(a=2.0, b=2.0, c=2.0), CABLE, links("abc"))
    assert "tok/s without it" in prediction.prediction_text(document, predicted)
