# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""peer_firewall as Ansible runs it, over an iptables that lives in this file."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.modules import peer_firewall


class Iptables:
    """Enough of iptables to add to and take from; nothing else is installed."""

    def __init__(self):
        self.rules = ["-A INPUT -i lo -j ACCEPT"]
        self.refuses = ""
        self.changes = []

    def path(self, program):
        return f"/sbin/{program}" if program == "iptables" else None

    def run(self, argv):
        words = argv[1:]
        if words == ["--version"]:
            return 0, "iptables v1.8.9 (nf_tables)\n", ""
        if "-S" in words:
            return 0, "\n".join(["-P INPUT DROP", *self.rules]) + "\n", ""
        if self.refuses:
            return 4, "", self.refuses
        self.changes.append(words)
        if "-I" in words:
            self.rules.insert(0, "-A INPUT " + shlex.join(words[4:]))
        elif "-D" in words:
            self.rules.remove("-A INPUT " + shlex.join(words[3:]))
        return 0, "", ""


@pytest.fixture
def iptables(monkeypatch):
    fake = Iptables()
    monkeypatch.setattr(bare, "find", fake.path)
    monkeypatch.setattr(bare, "run", lambda argv, environ: fake.run(argv))
    monkeypatch.setattr(peer_firewall.os, "geteuid", lambda: 0)
    return fake


OPEN = {"name": "d4", "peers": ["192.168.1.11"], "ports": ["29500", "32768-60999"]}
RULES = ["tcp from 192.168.1.11 to port 29500", "tcp from 192.168.1.11 to port 32768-60999"]


def test_a_change(run_module, iptables):
    given = {**OPEN, "peers": ["192.168.1.11", "192.168.1.11"], "ports": ["29500", "32768-50000", "50001:60999"]}
    result = run_module(peer_firewall, **given)
    assert result["changed"]
    assert (result["backend"], result["rules"]) == ("iptables", RULES)
    assert [rule.split("--dport ")[1].split()[0] for rule in iptables.rules[:2]] == ["29500", "32768:60999"]
    assert result["persistent"] is False
    assert "reboot" in result["message"]


def test_the_same_in_check_mode_with_its_diff(run_module, iptables):
    result = run_module(peer_firewall, _check_mode=True, **OPEN)
    assert result["changed"]
    assert iptables.changes == []
    assert result["diff"] == {"before": "", "after": "\n".join(RULES) + "\n"}
    assert len(result["commands"]) == 2


def test_no_change(run_module, iptables):
    run_module(peer_firewall, **OPEN)
    before = list(iptables.rules)
    result = run_module(peer_firewall, **OPEN)
    assert not result["changed"]
    assert result["commands"] == []
    assert iptables.rules == before


def test_removal_leaves_the_rest_as_it_was(run_module, iptables):
    before = list(iptables.rules)
    run_module(peer_firewall, **OPEN)
    run_module(peer_firewall, **dict(OPEN, name="other"))
    run_module(peer_firewall, name="other", state="absent")
    assert run_module(peer_firewall, name="d4", state="absent")["changed"]
    assert iptables.rules == before
    assert not run_module(peer_firewall, name="d4", state="absent")["changed"]


def test_a_failure_names_the_command_and_the_tools_own_words(run_module, iptables):
    iptables.refuses = "Another app is currently holding the xtables lock"
    result = run_module(peer_firewall, **OPEN)
    assert result["failed"]
    assert "iptables -w -I INPUT 1" in result["msg"]
    assert "holding the xtables lock" in result["msg"]


def test_a_tool_that_says_yes_and_does_nothing_is_found_out(run_module, iptables, monkeypatch):
    monkeypatch.setattr(iptables, "run", lambda argv, **kwargs: (0, "-P INPUT DROP\n", ""))
    result = run_module(peer_firewall, **OPEN)
    assert result["failed"]
    assert "had no effect" in result["msg"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(
            ({"peers": [peer]}, f"{peer!r} is not an IPv4 or IPv6 address")
            for peer in ("laptop", "192.168.1", "10.0.0.0/8", "fe80::zz")
        ),
        *(
            ({"ports": [ports]}, f"{ports!r} is neither a port")
            for ports in ("0", "65536", "20-10", "http", "1-2-3", "-5")
        ),
        # Which could break out of a comment.
        *(
            ({"name": name}, f"{name!r} cannot mark firewall rules")
            for name in ("", "a b", "a;b", "-x", "x" * 65, 'a"')
        ),
        ({"name": None}, "name"),
    ],
)
def test_bad_input_is_named(run_module, iptables, wrong, words):
    assert words in run_module(peer_firewall, **dict(OPEN, **wrong))["msg"]


def test_field_02_without_root_nothing_fails_and_nothing_changes(run_module, iptables, monkeypatch):
    monkeypatch.setattr(peer_firewall.os, "geteuid", lambda: 1000)
    result = run_module(peer_firewall, **OPEN)
    assert not result["changed"] and result["commands"] == []
    # No service or file shows that these rules are in force.
    assert result["if_closed"][0].startswith("sudo iptables -w -I INPUT 1 -s 192.168.1.11/32 -p tcp")
    assert iptables.changes == []


def test_field_29_without_a_name_what_no_live_run_needs_is_closed(run_module, iptables, monkeypatch):
    for name in ("d4", "d8"):
        run_module(peer_firewall, **{**OPEN, "name": name})
    monkeypatch.setattr(peer_firewall, "live_runs", lambda: {"d8"})
    planned = run_module(peer_firewall, state="absent", _check_mode=True)
    assert planned["changed"] and all("nanochat.ddp:d4" in command for command in planned["commands"])
    done = run_module(peer_firewall, state="absent")
    assert done["changed"] and done["diff"] == planned["diff"]
    assert sum("nanochat.ddp:d8" in rule for rule in iptables.rules) == len(RULES)
    assert not any("nanochat.ddp:d4" in rule for rule in iptables.rules)
    assert not run_module(peer_firewall, state="absent")["changed"]
