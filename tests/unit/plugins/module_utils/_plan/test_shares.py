# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shares of unequal hosts, by threads, by speed, and as a run has had them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import resolve
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.shares import (
    BatchError,
    plan_batch,
)
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import (
    flag,
    hosts,
    lan,
    one_machine,
    planned,
    refusal,
)
from hypothesis import given
from hypothesis import strategies as st


def test_field_17_rows_follow_threads_or_speed():
    split = {"ddp_total_batch": 6144, "ddp_batch_split": "threads"}
    outcome = make_plan(hosts(split))
    assert [entry["rows"] for entry in outcome.plan["nodes"]] == [8, 4]
    assert [entry["accumulation"] for entry in outcome.plan["nodes"]] == [1, 1]
    assert [flag(entry, "rank-rows") for entry in outcome.plan["nodes"]] == [[8, 4]] * 2
    speeds = {"ddp_total_batch": 8192, "ddp_batch_split": "speed"}
    fast, slow = ({"measured": {"tokens_per_second": speed}} for speed in (900, 300))
    assert planned(speeds, fast, slow)["training"]["rows"] == [12, 4]
    assert planned(speeds, {"ddp_speed": 1, **fast}, {"ddp_speed": 1})["training"]["rows"] == [8, 8]
    assert "the speed of laptop is unknown" in refusal(hosts(speeds, {"ddp_speed": 2}))[0]


@pytest.mark.parametrize("split", [None, "auto", "equal", "threads", "speed"])
@pytest.mark.parametrize("profile", ["smoke", "real"])
@pytest.mark.parametrize("speeds", [(), (900.0, 300.0), (400.0, 200.0, 100.0)])
def test_field_34_any_number_of_hosts_with_nothing_set_is_fine(profile, split, speeds):
    for count in range(1, 13):
        settings = {"ddp_profile": profile, **({"ddp_batch_split": split} if split else {})}
        training = make_plan(lan(count, settings, speeds)).plan["training"]
        sequence = 512 if profile == "smoke" else 1024
        assert len(training["rows"]) == count
        assert training["total_batch"] == sum(training["rows"]) * sequence
        assert all(rows > 0 for rows in training["rows"]) and training["device_batch"] > 0
        assert 4 / 1.5 <= sum(training["rows"]) <= max(6, count)


def test_field_34_unequal_hosts_share_by_their_measured_speed_with_nothing_set():
    outcome = make_plan(lan(2, speeds=(900.0, 300.0)))
    assert (outcome.plan["training"]["rows"], outcome.plan["training"]["device_batch"]) == ([3, 1], 3)
    assert [entry["accumulation"] for entry in outcome.plan["nodes"]] == [1, 1]
    # Parts of the head are finer than rows.
    assert outcome.plan["training"]["head_shares"] == [750, 250]
    assert flag(outcome.plan["nodes"][0], "head-shares") == [750, 250]
    assert flag(outcome.plan["nodes"][0], "rebalance") is True
    assert flag(outcome.plan["nodes"][0], "rank-rows") == [3, 1]
    assert flag(outcome.plan["nodes"][0], "device-batch-size") == 3
    # Alike, or measured beside each other on one machine.
    assert make_plan(lan(2, speeds=(900.0, 850.0))).plan["training"]["rows"] == [2, 2]
    beside = one_machine()
    beside[0]["probe"]["measured"], beside[1]["probe"]["measured"] = {"tokens_per_second": 9}, {"tokens_per_second": 2}
    assert make_plan(beside).plan["training"]["rows"] == [2, 2]
    told = make_plan(lan(2, {"ddp_device_batch": 2}, (900.0, 300.0))).plan["training"]
    assert (told["rows"], told["device_batch"]) == ([3, 1], 2)


def on_hybrid(**changes: Any) -> list[dict[str, Any]]:
    """Two hosts, the first with cores of two kinds."""
    known = lan(2)
    known[0]["settings"].update({key: value for key, value in changes.items() if key.startswith("ddp_")})
    known[0]["probe"]["cpu"].update(fast=[0, 2], allowed=[0, 1, 2, 3, 4, 5])
    known[0]["probe"].update({key: value for key, value in changes.items() if not key.startswith("ddp_")})
    return known


def test_field_33_the_fast_cores_are_taken():
    taken = make_plan(on_hybrid()).plan["nodes"][0]
    assert (taken["threads"], taken["cores"]) == (2, [0, 2])
    assert (taken["env"]["NANOCHAT_CORES"], taken["env"]["OMP_NUM_THREADS"]) == ("0,2", "2")
    limited = make_plan(on_hybrid(ddp_threads=5)).plan["nodes"][0]
    assert (limited["threads"], limited["cores"]) == (5, None)
    # Where all processors are fast cores, or a quota gives some time of any, the kernel chooses.
    for cpu, threads in (({"allowed": [0, 2]}, 2), ({"available_physical": 1}, 1)):
        known = on_hybrid()
        known[0]["probe"]["cpu"].update(cpu)
        node = make_plan(known).plan["nodes"][0]
        assert (node["threads"], node["cores"]) == (threads, None)


def test_field_33_a_run_keeps_its_processors():
    for cores, kept in (([0, 2, 4, 5], [0, 2, 4, 5]), (None, None), ([0, 7], None)):
        run = {"checkpoints": [5], "shares": {"h0": share(2, cores=cores), "h1": share(2)}}
        assert make_plan(on_hybrid(run=run)).plan["nodes"][0]["cores"] == kept


def share(rows: int, head_share: int = 0, **more: Any) -> dict[str, Any]:
    """A host's share of an earlier start."""
    return {"rows": rows, "head_share": head_share, "cores": None, "polite": None, **more}


def test_field_17_a_run_keeps_its_shares_whatever_is_measured_later():
    split = {"ddp_total_batch": 8192, "ddp_batch_split": "speed"}
    before = {"checkpoints": [5], "shares": {"desktop": share(10), "laptop": share(6)}}
    fast = {"run": before, "measured": {"tokens_per_second": 900}}
    slow = {"run": before, "measured": {"tokens_per_second": 300}}
    assert planned(split, fast, slow)["training"]["rows"] == [10, 6]
    # Unless it is started anew, other speeds are given, the shares no longer fit, or the hosts are others.
    for change in ({"ddp_fresh": True}, {"ddp_total_batch": 16384}):
        assert planned({**split, **change}, fast, slow)["training"]["rows"] not in ([10, 6], [6, 10])
    told = planned(split, {**fast, "ddp_speed": 1}, {**slow, "ddp_speed": 1})
    assert told["training"]["rows"] == [8, 8]
    torn = {**fast, "run": {**before, "shares": {}}}
    assert planned(split, torn, slow)["training"]["rows"] == [12, 4]


def test_a_run_keeps_its_parts_of_the_head_and_equal_shares_stay_equal():
    before = {"checkpoints": [5], "shares": {"desktop": share(10, 600), "laptop": share(6, 400)}}
    each = [{"run": before, "measured": {"tokens_per_second": speed}} for speed in (900, 300)]
    split = {"ddp_total_batch": 8192, "ddp_head": "shared"}
    assert planned(split, *each)["training"]["head_shares"] == [600, 400]
    assert planned({**split, "ddp_fresh": True}, *each)["training"]["head_shares"] == [750, 250]
    assert "head_shares" not in planned({**split, "ddp_head": "whole"}, *each)["training"]
    for fixed in ("equal", "threads"):
        assert "rebalance" not in planned({"ddp_batch_split": fixed})["nodes"][0]["flags"]


# The sharing out of a batch

BASE = resolve([("desktop", {})])


def told(total=None, device=None, sequence=512, rows=4, most=2):
    """Settings with a batch; if it is given, the user wrote it."""
    run = dataclasses.replace(
        BASE.run, sequence=sequence, total_batch=total or rows * sequence, device_batch=device or most
    )
    wrote = {"ddp_total_batch": total, "ddp_device_batch": device}
    return dataclasses.replace(BASE, run=run, given=frozenset(name for name, value in wrote.items() if value))


@given(
    sequence=st.sampled_from([128, 512, 1024]),
    wanted=st.integers(1, 64),
    device=st.integers(1, 9),
    told_device=st.booleans(),
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=12),
    equal=st.booleans(),
)
def test_nothing_that_was_not_asked_for_is_ever_refused(sequence, wanted, device, told_device, weights, equal):
    weights = [1.0] * len(weights) if equal else weights
    limits = {"device": device} if told_device else {"most": device}
    found = plan_batch(told(sequence=sequence, rows=wanted, **limits), weights, equal)
    assert found.total_batch == sum(found.rows) * sequence
    assert all(rows > 0 for rows in found.rows)
    assert 1 <= found.device_batch <= max(found.rows)
    assert found.device_batch <= device or not told_device
    assert len(set(found.rows)) == 1 or not equal


@pytest.mark.parametrize(
    ("total", "device", "world", "equal", "sentence"),
    [
        (2000, 2, 2, True, "2000 is not a multiple of ddp_sequence x ddp_device_batch x 2 hosts = 512 x 2 x 2 = 2048"),
        (5000, 2, 2, True, "use 4096 or 6144."),
        (2048, None, 3, True, "of ddp_sequence x 3 hosts = 512 x 3 = 1536; use 1536 or 3072."),
        (1000, None, 1, True, "ddp_total_batch 1000 is not a multiple of ddp_sequence = 512; use 512 or 1024."),
        (512, None, 2, False, "has too few rows for 2 hosts; use 1024 or more."),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(total, device, world, equal, sentence):
    with pytest.raises(BatchError) as caught:
        plan_batch(told(total, device), [1.0] * world, equal)
    assert sentence in str(caught.value)
