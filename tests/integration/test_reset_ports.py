# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reset closes the ports and nothing else, also after a reboot, and becomes root only where it must."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import run_folder
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


def play(lan: Lan, name: str, *words: str, **settings: object) -> str:
    done = lan.playbook(f"nanochat.ddp.{name}", *words, **settings)
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
    play(lan, "reset", "-e", "ddp_run=early")
    assert opened(lan) == {"late", "other"}

    marked = ["NANOCHAT_DDP_SESSION=x", "NANOCHAT_BASE_DIR=/elsewhere/runs/other"]
    live = lan.start(0, "env", *marked, sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    try:
        assert live.stdout.readline() == "up\n"
        assert "changed=1" in play(lan, "reset", "--check")
        assert opened(lan) == {"late", "other"}
        play(lan, "reset")
        # Both hosts are namespaces of this machine and see the same processes.
        assert opened(lan, 0) == opened(lan, 1) == {"other"}
    finally:
        live.kill()
        live.communicate()
    # A damaged plan keeps no port open.
    plan = tmp_path / "h0" / "runs" / "other" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text('{"format": 1, "nod')
    play(lan, "reset")
    assert rules(lan) == before
    assert play(lan, "reset").count("changed=0") == 2


def test_field_29_a_reset_of_one_host_closes_all_its_ports_and_names_who_else_took_part(lan, tmp_path):
    kept = tmp_path / "plan.json"
    open_ports(lan, "early", "late")
    play(lan, "plan", "-e", f"ddp_plan_file={kept}", ddp_run="late")
    plan = json.loads(kept.read_text())["plan"]
    # A launch would leave the plan there; nothing else of it is needed here.
    run_folder(plan["nodes"][0]["run_dir"], plan, host="h0")

    told = " ".join(play(lan, "reset", "-e", "target=h0").split())
    assert (opened(lan, 0), opened(lan, 1)) == (set(), {"early", "late"})
    assert "h1 took part in the run late and not in this reset." in told
    assert "stay open until reset is run for it, too." in told


def test_nobody_becomes_root_but_for_the_firewall_and_it_is_told_whether_its_rules_outlast_a_reboot(lan, tmp_path):
    """`sudo` logs its callers here; the user is root, so no task may call it."""
    log = tmp_path / "asked"
    sudo = tmp_path / "sudo"
    sudo.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit 1\n')
    sudo.chmod(0o755)
    settings = {"ansible_become_exe": str(sudo), "ansible_become": True, "ddp_run": "early"}
    told = play(lan, "train", "--tags", "network", **settings)
    assert opened(lan, 0) == opened(lan, 1) == {"early"}
    kept = shutil.which("systemctl") and not subprocess.call(["systemctl", "-q", "is-enabled", "nftables"])
    assert ("Then `train.yml --tags restart` opens the ports again." in told) is not bool(kept)
    play(lan, "status", **settings)
    play(lan, "reset", **settings)
    assert opened(lan) == set()
    assert not log.exists(), log.read_text()
