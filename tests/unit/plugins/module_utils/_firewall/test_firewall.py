# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules of a job: from addresses and ports to what is wanted, and how each backend gets from what is there to that.

The tools are scripted here; molecule:firewalls and the pins below tests/pins/firewall use real ones.
"""

from __future__ import annotations

import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall import firewalld, iptables, nftables, rules, ufw
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.apply import (
    BACKENDS,
    FirewallRequest,
    apply,
    carry_out_step,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend, Placed
from hypothesis import given
from hypothesis import strategies as st

MARK = "nanochat.ddp:d4"
FOUR = rules.Rule("192.168.1.11", 29500, 29500)
WIDE = rules.Rule("192.168.1.11", 32768, 60999)
SIX = rules.Rule("fd00::11", 29500, 29500)
OTHER = rules.Rule("192.168.1.12", 29500, 29500)


@pytest.fixture(autouse=True)
def etc(tmp_path, monkeypatch):
    """The folder of the files that are loaded at boot."""
    monkeypatch.setattr(nftables, "FILE", f"{tmp_path}/nftables.conf")
    monkeypatch.setattr(iptables, "FILES", {"iptables": f"{tmp_path}/rules.v4", "ip6tables": f"{tmp_path}/rules.v6"})
    return tmp_path


def script(**answers):
    """A run(argv) that knows these commands by their first words, joined by _; every other program is missing."""
    calls = []

    def run(argv):
        calls.append(list(argv))
        for length in range(len(argv), 0, -1):
            found = answers.get("_".join(argv[:length]).replace("-", ""))
            if found is not None:
                return found if isinstance(found, tuple) else (0, found, "")
        return 127, "", f"{argv[0]} is not installed"

    run.calls = calls  # type: ignore[attr-defined]
    return run


def request(*wanted, **more):
    asked = {
        "job": "d4",
        "wanted": list(wanted),
        "needed": [one.peer for one in wanted],
        "present": True,
        "check": True,
    }
    return FirewallRequest(**{**asked, **more})


def change(kind, run, *wanted, needed=None):
    """The change that one backend would make."""
    backend = kind(run, "d4")
    backend.read()
    return backend.change(list(wanted), [one.peer for one in wanted] if needed is None else needed)


def argvs(change):
    return [step.argv for step in change.steps]


def test_rules_are_made_for_every_peer_once_and_without_its_zone():
    wanted = rules.wanted_rules(["192.168.1.11", "fd00:0::11", "fe80::1%eth0", "192.168.1.11"], [29500])
    assert wanted == [FOUR, SIX, rules.Rule("fe80::1", 29500, 29500)]


@given(
    text=st.text(alphabet="ab#\n ", max_size=40), lines=st.lists(st.sampled_from(["insert a", "insert b"]), max_size=3)
)
def test_a_block_comes_and_goes_without_a_trace(text, lines):
    with_it = rules.with_block(text, MARK, lines)
    assert rules.with_block(with_it, MARK, []) == text
    assert all(line in with_it.splitlines() for line in lines)
    assert rules.with_block(with_it, MARK, lines) == with_it


def test_a_block_of_another_job_stays():
    text = rules.with_block(rules.with_block("flush ruleset\n", MARK, ["one"]), MARK + "2", ["two"])
    assert rules.with_block(text, MARK, []) == rules.with_block("flush ruleset\n", MARK + "2", ["two"])


# ufw

ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw deny 29500/tcp
ufw allow from 192.168.1.11 to any port 29500 proto tcp comment 'nanochat.ddp:d4,e5'
ufw allow from 10.0.0.9 to any port 80 proto tcp comment 'hi there'
"""
DENY = "Status: active\nDefault: deny (incoming), allow (outgoing)\n"
# iptables

IN = "-P INPUT ACCEPT\n-A INPUT "


@pytest.mark.parametrize(
    ("listing", "drops"),
    [
        ("-P INPUT ACCEPT\n", False),
        ("-P INPUT DROP\n", True),
        (IN + "-p tcp -j REJECT\n", True),
        (IN + "-p tcp -j LOG\n", False),
        ("-P INPUT ACCEPT\n-N mine\n-A INPUT -j mine\n-A mine -s 1.2.3.4/32 -j DROP\n", True),
        ("-P INPUT ACCEPT\n-P FORWARD DROP\n-A FORWARD -j DROP\n", False),
        ("-P INPUT ACCEPT\n-N mine\n-A mine -j DROP\n", False),  # nothing leads there
        ("", False),
    ],
)
def test_iptables_is_opened_where_a_packet_can_be_dropped_on_its_way_through_input(listing, drops):
    assert apply(script(iptables_w_S=listing), request(FOUR))["backend"] == ("iptables" if drops else "none")


@pytest.mark.parametrize(
    "words", ["Address family not supported by protocol", "Table does not exist (do you need to insmod?)"]
)
def test_a_kernel_without_ipv6_has_no_ip6tables(words):
    run = script(iptables_w_S="-P INPUT DROP\n", ip6tables_w_S=(3, "", f"can't initialize ip6tables table: {words}"))
    assert change(iptables.Iptables, run, FOUR, SIX).after == [FOUR.text()]


def own_line(rule, mark=MARK):
    return "-A INPUT " + " ".join(iptables.words_of(rule, f'"{mark}"')) + "\n"


def test_a_peer_that_needs_none_keeps_its_rule_and_gets_no_new_one():
    run = script(iptables_w_S="-P INPUT DROP\n" + own_line(FOUR))
    assert change(iptables.Iptables, run, FOUR, OTHER, needed=[]).steps == []
    assert change(iptables.Iptables, run, FOUR, OTHER, needed=[]).after == [FOUR.text()]
    assert change(iptables.Iptables, run, FOUR, OTHER, needed=[OTHER.peer]).after == [FOUR.text(), OTHER.text()]
    # With the ports that are wanted now.
    assert change(iptables.Iptables, run, WIDE, needed=[]).after == [WIDE.text()]


def nft_own(rule, mark):
    return base(policy="drop", rules=[f'ip saddr {rule.peer} tcp dport {rule.ports()} accept comment "{mark}"'])


E5 = "nanochat.ddp:e5"
LET_IN_BY_E5 = {
    iptables.Iptables: lambda: script(iptables_w_S="-P INPUT DROP\n" + own_line(FOUR, E5)),
    ufw.Ufw: lambda: script(ufw_version="0", ufw_status_verbose=DENY, ufw_show_added=ADDED.replace("d4,e5", "e5")),
    nftables.Nftables: lambda: nft(nft_own(FOUR, E5)),
    firewalld.Firewalld: lambda: firewall_cmd(with_rich(FOUR, E5), with_rich(FOUR, E5)),
}


@pytest.mark.parametrize("kind", LET_IN_BY_E5)
def test_a_peer_that_another_job_lets_in_gets_a_rule_of_this_job_too(kind):
    """It could connect, so trying found nothing; but the other job's rule goes with that job."""
    found = change(kind, LET_IN_BY_E5[kind](), FOUR, OTHER, needed=[])
    assert {line.rpartition(": ")[2] for line in found.after} == {FOUR.text()} and found.steps


SAVED = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n*filter\n:INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n"


@pytest.mark.parametrize(("text", "lost"), [(SAVED, False), (SAVED.partition("*filter")[0], True)])
def test_iptables_survives_a_reboot_where_saved_rules_are_loaded(etc, text, lost):
    (etc / "rules.v4").write_text(text)
    run = script(iptables_w_S="-P INPUT DROP\n", systemctl_isenabled_netfilterpersistent="enabled\n")
    found = change(iptables.Iptables, run, FOUR)
    assert bool(found.note) is lost
    assert [step.path for step in found.steps if MARK in step.text] == ([] if lost else [f"{etc}/rules.v4"])


# nftables


def base(name="input", policy="accept", table="filter", family="inet", hook="input", rules=(), more=""):
    """A table with one base chain, as nft lists it."""
    lines = "".join(f"\t\t{rule} # handle {number}\n" for number, rule in enumerate(rules, 5))
    head = f"\t\ttype filter hook {hook} priority filter; policy {policy};\n"
    chain = f"\tchain {name} {{ # handle 1\n{head}{lines}\t}}\n"
    return f"table {family} {table} {{ # handle 2\n{more}{chain}}}\n"


def nft(*tables, **answers):
    return script(nft="".join(tables), **answers)


BAD = "\tchain bad {{ # handle 3\n\t\t{} # handle 4\n\t}}\n"


@pytest.mark.parametrize(
    ("table", "drops"),
    [
        ("", False),
        (base(), False),
        (base(policy="drop"), True),
        (base(hook="prerouting", policy="drop"), True),
        (base(policy="drop", family="bridge"), False),
        (base(rules=['log prefix "drop: " accept comment "no drop"']), False),
        (base(rules=[f'accept comment "{rules.MARK}drop"']), False),
        (base(rules=['log prefix "#{1; " drop comment "ticket #5"']), True),
        (base(rules=["tcp dport { 22, 80 } reject with tcp reset"]), True),
        (base(rules=["tcp dport 1-9 jump bad"], more=BAD.format("drop")), True),
        (base(rules=["tcp dport vmap @m"]), True),
        (base(more=BAD.format("drop")), False),  # nothing leads there
        (base(rules=["ct state vmap { invalid : drop, established : accept }"]), True),
        (base("filter_INPUT", "drop", "firewalld"), False),
    ],
)
def test_nftables_is_opened_in_native_chains_where_a_packet_can_be_dropped(table, drops):
    assert apply(nft(table), request(FOUR))["backend"] == ("nftables" if drops else "none")


@pytest.mark.parametrize("name", ["f2b-sshd", "KUBE-FIREWALL", "DOCKER-USER", "LIBVIRT_INP", "netavark"])
def test_field_30_chains_and_tables_of_other_programs_are_named_and_left_alone(name):
    listing = f"-P INPUT ACCEPT\n-N {name}\n-A INPUT -j {name}\n-A {name} -s 192.168.1.11/32 -j REJECT\n"
    table = base("chain", table=name, hook="prerouting", rules=["drop"])
    result = apply(nft(table, iptables_w_S=listing), request(FOUR))
    assert (result["changed"], result["commands"]) == (False, [])
    assert result["foreign"] == [f"nft chain inet {name} chain", f"iptables chain {name}"]


@pytest.mark.parametrize(
    ("version", "opened"),
    [("v1.8.9 (nf_tables)", "iptables"), ("v1.8.9 (legacy)", "nftables+iptables"), (None, "nftables")],
)
def test_a_table_of_iptables_is_opened_by_the_tool_that_keeps_it(version, opened):
    tools = ("iptables", "ip6tables") if version else ()
    answers = {
        f"{tool}_{asked}": told for tool in tools for asked, told in (("version", version), ("w_S", "-P INPUT DROP\n"))
    }
    assert apply(nft(base("INPUT", "drop", "filter", "ip"), **answers), request(FOUR))["backend"] == opened


@pytest.mark.parametrize("check", [(0, "", ""), (1, "", "x.nft:3:1: Error: No such file or directory")])
def test_nftables_survives_a_reboot_where_its_file_is_loaded_and_a_boot_never_fails_at_it(etc, check):
    (etc / "nftables.conf").write_text("flush ruleset\n")
    run = nft(base(policy="drop"), nft_c=check, systemctl_isenabled_nftables="enabled\n")
    found = change(nftables.Nftables, run, FOUR)
    files = [step.text for step in found.steps if step.path]
    if check[0]:
        assert "does not define the chains" in found.note and files == []
    else:
        assert found.note == ""
        assert files[0].startswith("flush ruleset\n# BEGIN nanochat.ddp:d4\ninsert rule inet filter input")


# firewalld

ZONES = """block
  target: %%REJECT%%
  interfaces:
  sources:
  rich rules:

home
  target: default
  interfaces:
  sources: 10.7.0.0/16 00:11:22:33:44:55 ipset:friends
  rich rules:

public (active)
  target: default
  interfaces: enp4s0
  sources:
  rich rules:
\trule family="ipv4" source address="10.0.0.1" reject
libvirt (active)
  interfaces: virbr0
trusted
  target: ACCEPT
  interfaces: tun0
unused
  target: DROP
"""


def firewall_cmd(running, permanent):
    return script(
        firewallcmd_state="running\n", firewallcmd_listallzones=running, firewallcmd_getdefaultzone="block\n",
        firewallcmd_permanent_listallzones=permanent,
    )  # fmt: skip


def with_rich(rule, mark=MARK):
    return ZONES.replace("reject\n", f"reject\n\t{firewalld.rich_rule(rule, mark)}\n")


def test_firewalld_puts_a_rule_in_every_zone_in_use_now_and_for_good():
    found = change(firewalld.Firewalld, firewall_cmd(ZONES, ZONES), FOUR)
    scopes = (["firewall-cmd"], ["firewall-cmd", "--permanent"])
    adds = f"--add-rich-rule={firewalld.rich_rule(FOUR, MARK)}"
    zones = ("block", "home", "public", "trusted")
    assert sorted(argvs(found)) == sorted([*scope, f"--zone={zone}", adds] for scope in scopes for zone in zones)
    assert (found.after, found.note) == ([f"zone {zone}: {FOUR.text()}" for zone in zones], "")


def test_rules_of_a_stopped_firewalld_are_taken_away_as_well():
    offline = {"firewallofflinecmd_version": "1.3", "firewallofflinecmd_listallzones": with_rich(FOUR)}
    run = script(firewallcmd_state=(252, "", "not running"), **offline)
    rich = firewalld.rich_rule(FOUR, MARK)
    assert argvs(change(firewalld.Firewalld, run)) == [
        ["firewall-offline-cmd", "--zone=public", f"--remove-rich-rule={rich}"]
    ]


# Closing what is left over


def left_over(**more):
    return request(**{"job": "", "present": False, "check": False, **more})


def test_field_29_rules_of_firewalld_are_found_by_their_form_and_those_to_keep_by_their_name():
    run = firewall_cmd(with_rich(FOUR), with_rich(FOUR))
    found = apply(run, left_over(check=True))
    assert len(found["commands"]) == 2
    assert all(firewalld.rich_rule(FOUR, MARK) in command for command in found["commands"])
    assert not apply(run, left_over(check=True, keep=("d4",)))["changed"]


def test_a_rule_of_firewalld_that_has_the_form_of_ours_but_admits_to_a_port_of_root_is_left_alone():
    ssh = rules.Rule("10.0.0.9", 22, 22)
    run = firewall_cmd(with_rich(ssh, "of the owner"), with_rich(ssh, "of the owner"))
    assert not apply(run, left_over(check=True))["changed"]


def test_field_29_blocks_of_all_jobs_are_found_in_the_file_that_is_loaded_at_boot(etc):
    text = rules.with_block("flush ruleset\n", MARK, ["one"])
    (etc / "nftables.conf").write_text(rules.with_block(text, rules.MARK + "e5", ["two"]))
    backend = nftables.Nftables(nft(), "")
    backend.read()
    assert backend.names([]) == {"d4", "e5"}


# Choosing


def test_a_ban_beside_ufw_is_named_too():
    answers = {"ufw_version": "0.36", "ufw_status_verbose": DENY, "ufw_show_added": ""}
    listing = "-P INPUT DROP\n-N f2b-sshd\n-A INPUT -j f2b-sshd\n-A f2b-sshd -j REJECT\n"
    result = apply(script(iptables_w_S=listing, ip6tables_w_S=(1, "", "no"), **answers), request(FOUR))
    assert (result["backend"], result["foreign"]) == ("ufw", [])
    result = apply(script(iptables_w_S=listing, **answers), request(FOUR))
    assert (result["backend"], result["foreign"]) == ("ufw", ["iptables chain f2b-sshd"])


def test_field_02_a_root_that_may_not_is_treated_as_none(monkeypatch):
    monkeypatch.setattr(nftables.Nftables, "suspected", lambda self: True)
    run = script(nft___version="nftables", nft=(1, "", "Operation not permitted (you must be root)"))
    result = apply(run, request(FOUR, check=False))
    assert result["needs_root"]
    assert "not permitted" in result["message"]
    assert result["commands"][0].startswith("sudo nft insert rule ")


# Files of the owner's


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "rules.v4"
    path.write_text("old\n")
    path.chmod(0o640)
    carry_out_step(script(), rules.FirewallStep(["sh"], str(path), "new \udce4\n"))
    assert path.read_bytes() == b"new \xe4\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


# The recipe of CONTRIBUTING.md


class Gate(FirewallBackend):
    """A made-up firewall that holds one rule a line."""

    name = "gate"
    writes = ("iptables",)

    def read(self):
        self.lines = self.tool("gate", "list").split()

    def in_force(self):
        return True

    def marked(self):
        return [("d4", Placed((), rules.Rule(line, 1, 2))) for line in self.lines]

    def targets(self, wanted):
        return [Placed((), rule) for rule in wanted]

    def insertion(self, target):
        return ["gate", "open", target.rule.peer]

    def removal(self, placed):
        return ["gate", "shut", placed.rule.peer]

    def suspected(self):
        return True


def test_a_new_backend_is_one_class(monkeypatch):
    monkeypatch.setattr(sys.modules[apply.__module__], "BACKENDS", {"gate": Gate, **BACKENDS})
    held: list[str] = []

    def run(argv):
        if argv[0] == "iptables":
            return 0, "-P INPUT DROP\n", ""
        if argv[0] != "gate":
            return 127, "", ""
        if argv[1] == "open":
            held.append(argv[2])
        return 0, " ".join(held), ""

    one = request(rules.Rule("192.168.1.11", 1, 2), check=False)
    assert apply(run, one)["changed"]
    assert held == ["192.168.1.11"] and not apply(run, one)["changed"]
    assert apply(run, one._replace(root=False))["commands"] == ["sudo gate open 192.168.1.11"]
