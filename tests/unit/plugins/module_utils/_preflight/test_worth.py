# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each host's contribution, before a run and while it trains."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.filter import run_tables
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import describe
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import Link, Speed, job_of, predict
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import predict as prediction
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import worth
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.rates import slowest_between
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.model_size import Shape
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY

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
    found = worth.without_each(document, each, {}, [6, 6])
    assert found["a"] == pytest.approx(12 * 512 / each[1].alone(6), rel=1e-3)
    assert found == {"a": found["b"], "b": found["b"]}


def test_without_one_of_three_the_rest_is_what_a_plan_of_two_expects() -> None:
    document, each = plan({"a": 6, "b": 3, "c": 3}), speeds(a=0.5, b=1.0, c=1.0)
    found = worth.without_each(document, each, links("abc"), [6, 3, 3])
    two = predict(job_of(plan({"a": 8, "b": 4})), each[:2], CABLE, [8, 4])
    assert found["c"] == pytest.approx(two.tokens_per_second, rel=1e-3)
    assert found["a"] < found["b"] == found["c"]


def test_the_rest_waits_for_its_own_links_only() -> None:
    assert slowest_between(links("abc", "c"), "ab") == CABLE
    assert slowest_between(links("abc", "c"), "abc") == RADIO
    found = worth.without_each(plan(dict.fromkeys("abc", 4)), speeds(a=0.5, b=0.5, c=0.5), links("abc", "c"), [4] * 3)
    assert found["c"] > 2 * found["a"]


def test_what_is_not_known_is_not_told() -> None:
    each = speeds(a=0.5, b=0.5, c=0.5)
    assert worth.without_each(plan(dict.fromkeys("abc", 4)), each, {}, [4] * 3) == {}
    only_of_a = worth.without_each(plan(dict.fromkeys("abc", 4)), each, {"b": {"c": CABLE}}, [4] * 3)
    assert list(only_of_a) == ["a"]
    document = plan(dict.fromkeys("abc", 4))
    document["nodes"][1]["address"] = document["nodes"][2]["address"]
    assert list(worth.without_each(document, each, links("abc"), [4] * 3)) == ["a"]


def test_equal_shares_stay_equal_unless_they_follow_the_speeds() -> None:
    each, document = speeds(a=0.25, b=0.5, c=1.0), plan(dict.fromkeys("abc", 4), "equal")
    fixed = worth.without_each(document, each, links("abc"), [4] * 3)["a"]
    document["training"]["rebalance"] = True
    assert worth.without_each(document, each, links("abc"), [4] * 3)["a"] > 1.05 * fixed


def told(document: dict[str, Any], each: list[Speed], among: dict[str, dict[str, Link]]) -> dict[str, Any]:
    hosts = [node["host"] for node in document["nodes"]]
    predicted = prediction.outlook(document, each, slowest_between(among, hosts), (), among)
    return {one["code"]: one for one in prediction.advice(document, predicted)}


def test_field_16_a_host_that_costs_more_than_it_brings_is_named_with_figures_and_the_line_to_type() -> None:
    found = told(plan(dict.fromkeys("abc", 8)), speeds(a=1.0, b=1.0, c=1.0), links("abc", "c"))
    assert "not-worth-it" not in found
    one = found["host-costs-more"]
    assert one["host"] == "c"
    assert one["remedy"].startswith("Train without it: ansible-playbook train.yml -i INVENTORY -e target=a,b")
    assert one["seen"] == "without c 1417 tok/s, with it 74.1"


def test_two_hosts_on_the_same_slow_link_are_named_together() -> None:
    found = told(plan(dict.fromkeys("abcd", 8)), speeds(a=0.5, b=0.5, c=0.5, d=0.5), links("abcd", "cd"))
    assert found["host-costs-more"]["host"] == "c, d"
    assert "-e target=a,b" in found["host-costs-more"]["remedy"]


def test_nobody_is_to_be_left_out_where_all_bring_something() -> None:
    each = speeds(a=2.0, b=2.0, c=6.0)
    found = told(plan({"a": 10, "b": 10, "c": 3}), each, links("abc"))
    assert not {"host-costs-more", "not-worth-it"} & set(found)
    # Where one host alone is best, it is that one which is named.
    assert "not-worth-it" in told(plan(dict.fromkeys("abc", 2)), each, links("abc", "abc"))


def test_the_prediction_has_a_column_for_it() -> None:
    document = plan(dict.fromkeys("abc", 8))
    predicted = prediction.outlook(document, speeds(a=2.0, b=2.0, c=2.0), CABLE, (), links("abc"))
    assert "tok/s without it" in prediction.prediction_text(document, predicted)
    assert predicted["fewer"] is None
    assert predicted["links"]["a"]["b"] == [940.0, 0.2]


# While it trains


def runs(document: dict[str, Any], **seconds: float) -> dict[str, dict[str, Any]]:
    """run_info's answers for hosts that take this long for a pass of two rows."""
    among = links("".join(seconds), "c")
    found: dict[str, dict[str, Any]] = {}
    for node in document["nodes"]:
        host = node["host"]
        found[host] = {
            **EMPTY,
            "state": "running",
            "run": "d4",
            "rank": node["rank"],
            "world": document["world"],
            "tokens_per_second": 1000.0,
            "rows": node["rows"],
            "compute_seconds": seconds[host] * node["rows"] / 2,
            "optimizer_seconds": 0.05,
            "links": {peer: list(link) for peer, link in among[host].items()},
            "plan_facts": document if node["rank"] == 0 else None,
        }
    return found


def test_a_run_tells_what_its_hosts_are_worth_by_its_own_steps() -> None:
    document = plan({"a": 6, "b": 6})
    found = worth.worth_of_runs(runs(document, a=0.5, b=0.25))
    # Alone, a host updates all matrices instead of half of them.
    assert found["b"] == pytest.approx(12 * 512 / (6 * 0.5 + 0.1), rel=1e-3)
    assert found["a"] == pytest.approx(12 * 512 / (6 * 0.25 + 0.1), rel=1e-3)


def test_it_is_told_below_the_tables_and_to_programs() -> None:
    three = {host: {"run": run} for host, run in runs(plan(dict.fromkeys("abc", 4)), a=0.5, b=0.5, c=0.5).items()}
    filters = run_tables.FilterModule().filters()
    for name in ("status_table", "closing_table"):
        lines = filters[name](three).splitlines()
        assert any(line.startswith("  without c ") and line.endswith("more than it brings") for line in lines), lines
        assert any(line.startswith("  without a ") and line.endswith("tok/s, with it 1000") for line in lines), lines
    assert set(filters["status_data"](three)["tokens_per_second_without"]) == set("abc")
    for lacking in ({"compute_seconds": None}, {"world": 2}):
        one = {**three, "b": {"run": {**three["b"]["run"], **lacking}}}
        assert "without" not in filters["status_table"](one)


@pytest.mark.parametrize("broken", [{"nodes": None}, {"model": {}}, {"nodes": [{}, {}]}, {"training": {"sync": []}}])
def test_a_plan_of_another_shape_tells_nothing(broken: dict[str, Any]) -> None:
    two = runs(plan({"a": 6, "b": 6}), a=0.5, b=0.25)
    two["a"]["plan_facts"] = {**two["a"]["plan_facts"], **broken}
    assert worth.worth_lines(two) == []
