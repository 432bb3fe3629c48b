# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The network step between hosts with real firewalls opens what trying finds closed, keeps what helps and takes back the rest; reset closes
the ports and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import run_folder
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.lan import Lan

# Rules of a host's owner, who lets nobody in; and those of one who lets the peers in, and could drop: only trying tells.
WALL = """
table inet owner {
  chain input {
    type filter hook input priority filter; policy drop;
    iif lo accept
    ct state established,related accept
  }
}
"""
LETS_IN = WALL.replace("  }\n", "    ip saddr 10.9.0.0/24 tcp dport 29500-60999 accept\n  }\n")
# A router, or the peer's own rules, would do the same: no rule of the listening host helps.
NOTHING_LEAVES = """
table inet owner_out {
  chain output {
    type filter hook output priority filter; policy accept;
    ip daddr 10.9.0.2 tcp dport 29500-60999 drop
  }
}
"""
BAN = """
table inet f2b-table {
  chain f2b-chain {
    type filter hook input priority filter - 1; policy accept;
    ip saddr 10.9.0.1 reject
  }
}
"""


def network(lan: Lan, code: int = 0, **settings: object) -> str:
    return " ".join(lan.stage(**settings).play("nanochat.ddp.train", "--tags", "network", code=code).split())


def rules(lan: Lan) -> list[str]:
    return [lan.run(number, "nft", "list", "ruleset") for number in (0, 1)]


def opened(lan: Lan, number: int = 0) -> set[str]:
    """The runs that have rules on a host.

    They are not called d4 or d8: in a scenario of molecule beside this test, whose processes this machine sees, such a run lives."""
    text = lan.run(number, "nft", "list", "ruleset")
    return {line.split("nanochat.ddp:")[1].split('"')[0] for line in text.splitlines() if "nanochat.ddp:" in line}


def reset(lan: Lan, *words: str, **settings: object) -> str:
    return lan.stage(**settings).play("nanochat.ddp.reset", *words)


def open_ports(lan: Lan, *runs: str) -> None:
    """As the network step does it for these runs."""
    for run in runs:
        for number in (0, 1):
            lan.module(number, "peer_firewall", name=run, peers=[f"10.9.0.{2 - number}"], ports=["29500"])


def test_what_is_closed_is_opened_and_what_is_open_is_left_alone_by_who_is_root_anyway(lan, tmp_path):
    """`sudo` logs its callers here; the user is root, so no task may call it."""
    log, sudo = tmp_path / "asked", tmp_path / "sudo"
    sudo.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit 1\n')
    sudo.chmod(0o755)
    settings = {"ddp_run": "early", "ansible_become_exe": str(sudo), "ansible_become": True}
    lan.run(0, "nft", "-f", "-", text=LETS_IN)
    lan.run(1, "nft", "-f", "-", text=WALL)
    before = rules(lan)
    told = network(lan, **settings)
    opened = rules(lan)
    assert opened[0] == before[0], "h0 let its peer in before"
    assert "ip saddr 10.9.0.1 tcp dport 32768-60999 accept" in opened[1]
    kept = shutil.which("systemctl") and not subprocess.call(["systemctl", "-q", "is-enabled", "nftables"])
    assert ("Then `train.yml --tags restart` opens the ports again." in told) is not bool(kept)
    assert network(lan, **settings).count("changed=0") == 2
    assert rules(lan) == opened
    reset(lan, **settings)
    assert rules(lan) == before
    assert not log.exists(), log.read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "text", "cause"),
    [
        pytest.param(0, NOTHING_LEAVES, "h1 lets it in, so an outgoing", id="output"),
        pytest.param(1, BAN, "can drop packets: nft chain inet f2b-table f2b-chain", id="another program"),
    ],
)
def test_a_rule_that_does_not_help_is_taken_back_and_the_cause_named(lan, number, text, cause):
    lan.run(1, "nft", "-f", "-", text=WALL)
    lan.run(number, "nft", "-f", "-", text=text)
    before = rules(lan)
    told = network(lan, code=2)
    assert "h0 cannot connect to h1 (10.9.0.2) on port " in told and cause in told
    assert rules(lan) == before


def test_field_29_reset_closes_what_earlier_runs_opened_and_not_what_a_live_one_needs(lan, tmp_path):
    for number in (0, 1):
        lan.run(number, "nft", "-f", "-", text=WALL + BAN)
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
    for number in (0, 1):
        lan.run(number, "nft", "-f", "-", text=WALL)
    open_ports(lan, "early", "late")
    names = ("h0", "h1")
    plan = fake_run.plan_for([tmp_path / host / "runs/late" for host in names], 10, "late", names)
    # A launch would leave the plan there; nothing else of it is needed here.
    run_folder(plan["nodes"][0]["run_dir"], plan, host="h0")

    told = " ".join(reset(lan, "-e", "target=h0").split())
    assert (opened(lan, 0), opened(lan, 1)) == (set(), {"early", "late"})
    assert "h1 took part in the run late and not in this reset." in told
    assert "stay open until reset is run for it, too." in told
