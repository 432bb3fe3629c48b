# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reset closes the ports and nothing else."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import run_folder
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.lan import Lan

WALL = """
table inet owner {
  chain input {
    type filter hook input priority filter; policy drop;
    ct state established,related accept
  }
}
table inet f2b-table {
  set addr-set-sshd {
    type ipv4_addr
    elements = { 203.0.113.7 }
  }
  chain f2b-chain {
    type filter hook input priority filter - 1; policy accept;
    tcp dport 22 ip saddr @addr-set-sshd reject
  }
}
"""


@pytest.fixture
def lan(lan):
    for number in (0, 1):
        lan.run(number, "nft", "-f", "-", text=WALL)
    return lan


def rules(lan: Lan) -> list[str]:
    return [lan.run(number, "nft", "list", "ruleset") for number in (0, 1)]


def opened(lan: Lan, number: int = 0) -> set[str]:
    """The runs that have rules on a host.

    They are not called d4 or d8: in a scenario of molecule beside this test, whose processes this machine sees, such a run lives."""
    text = lan.run(number, "nft", "list", "ruleset")
    return {line.split("nanochat.ddp:")[1].split('"')[0] for line in text.splitlines() if "nanochat.ddp:" in line}


def reset(lan: Lan, *words: str) -> str:
    done = lan.playbook("nanochat.ddp.reset", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def open_ports(lan: Lan, *runs: str) -> None:
    """As the network step does it for these runs."""
    for run in runs:
        for number in (0, 1):
            lan.module(number, "peer_firewall", name=run, peers=[f"10.9.0.{2 - number}"], ports=["29500"])


def test_field_29_reset_closes_what_earlier_runs_opened_and_not_what_a_live_one_needs(lan, tmp_path):
    before = rules(lan)
    open_ports(lan, "early", "late", "other")
    assert opened(lan) == {"early", "late", "other"}
    assert "f2b-chain" in rules(lan)[0].split("nanochat.ddp:other")[-1]  # ours are all in the owner's chain
    reset(lan, "-e", "ddp_run=early")
    assert opened(lan) == {"late", "other"}

    marked = ["NANOCHAT_DDP_SESSION=x", "NANOCHAT_BASE_DIR=/elsewhere/runs/other"]
    live = lan.start(0, "env", *marked, sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    try:
        assert live.stdout.readline() == "up\n"
        reset(lan)
        # Both hosts are namespaces of this machine and see the same processes.
        assert opened(lan, 0) == opened(lan, 1) == {"other"}
    finally:
        live.kill()
        live.communicate()
    # A damaged plan keeps no port open.
    plan = tmp_path / "h0" / "runs" / "other" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text('{"format": 1, "nod')
    reset(lan)
    assert rules(lan) == before


def test_field_29_a_reset_of_one_host_closes_all_its_ports_and_names_who_else_took_part(lan, tmp_path):
    open_ports(lan, "early", "late")
    plan = fake_run.plan_for([tmp_path / host / "runs/late" for host in ("h0", "h1")], 10, "late")
    for node, host in zip(plan["nodes"], ("h0", "h1"), strict=True):
        node["host"] = host
    # A launch would leave the plan there; nothing else of it is needed here.
    run_folder(plan["nodes"][0]["run_dir"], signed({**plan, "data_ports": {"low": 32768, "high": 60999}}), host="h0")

    told = " ".join(reset(lan, "-e", "target=h0").split())
    assert (opened(lan, 0), opened(lan, 1)) == (set(), {"early", "late"})
    assert "h1 took part in the run late and not in this reset." in told
    assert "stay open until reset is run for it, too." in told
