# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a hostile host, from which the plan of all hosts would be made, and the plan that it sends back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import believed_plans, decode
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import Probe
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.validate import InvalidHostData
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> dict[str, Any]:
    """The answer of this machine, as the controller receives it."""
    base = tmp_path_factory.mktemp("base")
    (base / "data/books-1").mkdir(parents=True)
    (base / "data/books-1/manifest.json").write_text('{"format": 1, "id": "books-1", "shards": []}')
    (base / "runs/d4").mkdir(parents=True)
    nodes = [{"host": "a", "rank": 0, "rows": 2, "cores": [0, 1]}]
    data = {"id": "books-1", "source": "text", "paths": ["/srv/books"], "names": None}
    (base / "runs/d4/plan.json").write_text(json.dumps({"nodes": nodes, "data": data, "digest": "x"}))
    (base / "measured.json").write_text('{"tokens_per_second": 7.5}')
    told = host.host_info(
        str(base), run_dir=f"{base}/runs/d4", base_run="d4",
        ports=[29500], peers=["127.0.0.1", "nobody.invalid"], folders=["/"],
    )  # fmt: skip
    return dict(json.loads(json.dumps(told["probe"])))


def test_a_real_machine_is_believed(real):
    assert decode(Probe, copy.deepcopy(real)) == real


UNTRUE = [
    ("ephemeral", "low", -1), ("ephemeral", "high", 65536), ("ephemeral", "low", "1\nkernel.sysrq = 1"),
    ("base_dir", "/srv\n!touch evil"), ("base_dir", "srv"), ("host", "home", "/home/../etc"), ("host", "arch", "x86_64/../.."),
    ("python", "candidates", [{"executable": "/bin/sh", "version": "3.x"}]),
    ("python", "candidates", [{"executable": "python", "version": "3.11.2"}]),
    ("nics", [{"name": "eth0;reboot eth0 eth0"}]), ("nics", [{"name": "eth0", "ipv4": ["10.0.0.300/8"]}]),
    ("nics", [{"name": "eth0", "ipv6": ["2001:db8::1%$(reboot)/64"]}]), ("nics", [{"name": "eth0", "ipv4": "10.0.0.1/8"}]),
    ("run", "lineage", {"data": {"id": "../../../home/user/.ssh"}}), ("base_run", "lineage", {"data": {"id": "/etc"}}),
    ("data", [{"id": 7, "shards": 1, "bytes": 1}]),
    ("cpu", "fast", [0, "1,2"]), ("cpu", "fast", [10**9]),
    ("run", "shares", {"a": {"rows": "2"}}), ("run", "checkpoints", [10, float("inf")]), ("measured", {"tokens_per_second": float("nan")}),
    ("measured", {"products": {"fp32": {"tokens_per_second": 10**40}}}), ("sudo", "password"), ("sudo", True), ("nics", {}),
    ("cpu", "load1", "now"), ("memory", 7), ("disk", "free", 1e400),
]  # fmt: skip


@pytest.mark.parametrize("change", UNTRUE, ids=lambda change: ascii(change)[:60])
def test_what_cannot_be_true_is_refused_with_its_place(real, change):
    *place, name, value = change
    told = part = copy.deepcopy(real)
    for one in place:
        part = part[one]
    part[name] = value
    with pytest.raises(InvalidHostData, match=f"its {[*place, name][0]}.*; check that host") as why:
        decode(Probe, told)
    assert str(why.value).isprintable()


@pytest.mark.parametrize("told", [None, [], "probe", 5])
def test_what_is_no_probe_at_all_is_refused(told):
    with pytest.raises(InvalidHostData, match="its answer"):
        decode(Probe, told)


def test_facts_without_end_are_refused(real):
    deep: dict[str, Any] = {}
    for dummy in range(500):
        deep = {"deeper": deep}
    with pytest.raises(InvalidHostData, match="nested too deeply"):
        decode(Probe, {**real, "measured": {"model": deep}})


def deployed(**changes: Any) -> dict[str, Any]:
    nodes = [{"host": host, "rank": at, "address": f"10.0.0.{at + 1}", "nic": None} for at, host in enumerate("ab")]
    master = {"host": "a", "address": "10.0.0.1", "port": 29500}
    return {
        "run": "d4",
        "nodes": nodes,
        "master": master,
        "data_ports": {"low": 32768, "high": 60999},
        "timeout_seconds": 300,
        **changes,
    }


NODE = deployed()["nodes"][0]
HOSTILE = [
    {"run": "../../etc"}, {"run": None}, {"nodes": []}, {"nodes": "ab"}, {"nodes": [{**NODE, "host": "elsewhere"}]}, {"nodes": [{}]},
    {"nodes": [{**NODE, "address": "10.0.0.1;reboot"}]}, {"nodes": [{**NODE, "rank": "../0"}]}, {"data_ports": {"low": 22, "high": 22}},
    {"timeout_seconds": 1e308}, {"timeout_seconds": -1},
    {"master": None}, {"master": {"host": "a", "port": 29500, "address": "0.0.0.0"}}, {"nodes": [{**NODE, "rank": None}]},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda change: ascii(change)[:60])
def test_a_plan_that_cannot_be_is_not_believed(changes):
    assert believed_plans([deployed(**changes), None, [], "plan", deployed()], ["a", "b"]) == [deployed()]


def test_the_plan_that_most_hosts_have_comes_first_also_where_a_host_has_left_the_inventory():
    other = deployed(timeout_seconds=7)
    assert believed_plans([other, deployed(), deployed()], ["a"]) == [deployed(), deployed(), other]
    assert believed_plans([deployed()], ["c"]) == []
