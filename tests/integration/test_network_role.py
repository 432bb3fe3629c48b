# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The network step between hosts with real firewalls: it opens what trying finds closed, keeps what helps and takes back the rest."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import WALL, Lan

# Lets the peers in, and could drop: only trying tells.
LETS_IN = """
table inet owner {
  chain input {
    type filter hook input priority filter; policy drop;
    iif lo accept
    ct state established,related accept
    ip saddr 10.9.0.0/24 tcp dport 29500-60999 accept
  }
}
"""
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
    done = lan.playbook("nanochat.ddp.train", "--tags", "network", **settings)
    assert (done.returncode != 0) == bool(code), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return " ".join(done.stdout.split())


def rules(lan: Lan) -> list[str]:
    return [lan.run(number, "nft", "list", "ruleset") for number in (0, 1)]


def test_what_is_closed_is_opened_and_what_is_open_is_left_alone_by_who_is_root_anyway(lan, tmp_path):
    """`sudo` logs its callers here; the user is root, so no task may call it."""
    log, sudo = tmp_path / "asked", tmp_path / "sudo"
    sudo.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit 1\n')
    sudo.chmod(0o755)
    settings = {"ansible_become_exe": str(sudo), "ansible_become": True}
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
    done = lan.playbook("nanochat.ddp.reset", **settings)
    assert done.returncode == 0 and rules(lan) == before, done.stdout
    assert not log.exists(), log.read_text()


@pytest.mark.parametrize(
    ("number", "text", "cause"),
    [
        pytest.param(0, NOTHING_LEAVES, "h1 lets it in; an outgoing", id="output"),
        pytest.param(1, BAN, "can drop packets: nft chain inet f2b-table f2b-chain", id="another program", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_help_is_taken_back_and_the_cause_named(lan, number, text, cause):
    lan.run(1, "nft", "-f", "-", text=WALL)
    lan.run(number, "nft", "-f", "-", text=text)
    before = rules(lan)
    told = network(lan, code=2)
    assert "h0 cannot connect to h1 (10.9.0.2) on port " in told and cause in told
    assert rules(lan) == before
