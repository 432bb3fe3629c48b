# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules of a job: from addresses and ports to what is wanted, and how each backend gets from what is there to that."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall import backend as interface
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall import firewalld, iptables, nftables, rules, ufw
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.apply import FirewallRequest, apply, carry_out_step
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallStep
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.packets import Packets
from hypothesis import given
from hypothesis import strategies as st

MARK = "nanochat.ddp:d4"
FOUR = rules.Rule("192.168.1.11", 29500, 29500)
WIDE = rules.Rule("192.168.1.11", 32768, 60999)
SIX = rules.Rule("fd00::11", 29500, 29500)
PACKETS = Packets(FOUR, "eth0", ("127.0.0.1", "192.168.1.10", "fd00::10"))


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


# What is wanted


def test_rules_are_made_for_every_peer_and_range_once():
    wanted = rules.wanted_rules(["192.168.1.11", "fd00:0::11", "192.168.1.11"], [29500, "32768-60999"])
    assert wanted == [FOUR, WIDE, SIX, rules.Rule("fd00::11", 32768, 60999)]


def test_ranges_that_touch_become_one():
    assert rules.merged([(30, 40), (10, 20), (21, 25), (35, 50)]) == [(10, 25), (30, 50)]


@pytest.mark.parametrize("ports", ["0", "65536", "20-10", "http", "1-2-3", "", "-5"])
def test_what_is_no_port_is_refused_by_name(ports):
    with pytest.raises(rules.FirewallError, match="is neither a port"):
        rules.port_range(ports)


@pytest.mark.parametrize("peer", ["laptop", "192.168.1", "10.0.0.0/8", "fe80::zz"])
def test_what_is_no_address_is_refused_by_name(peer):
    with pytest.raises(rules.FirewallError, match="is not an IPv4 or IPv6 address"):
        rules.wanted_rules([peer], [1])


def test_a_zone_is_dropped_from_an_address():
    assert rules.address("fe80::1%eth0") == "fe80::1"


@pytest.mark.parametrize("name", ["", "a b", "a;b", "-x", "x" * 65, 'a"'])
def test_a_name_that_could_break_out_of_a_comment_is_refused(name):
    with pytest.raises(rules.FirewallError, match="cannot mark firewall rules"):
        rules.marker(name)


@given(
    text=st.text(alphabet="ab#\n ", max_size=40), lines=st.lists(st.sampled_from(["insert a", "insert b"]), max_size=3)
)
def test_a_block_comes_and_goes_without_a_trace(text, lines):
    with_it = rules.with_block(text, MARK, lines)
    assert rules.without_block(with_it, MARK) == text
    assert all(line in with_it.splitlines() for line in lines)
    assert rules.with_block(with_it, MARK, lines) == with_it


def test_a_block_of_another_job_stays():
    text = rules.with_block(rules.with_block("flush ruleset\n", MARK, ["one"]), MARK + "2", ["two"])
    assert rules.without_block(text, MARK) == rules.with_block("flush ruleset\n", MARK + "2", ["two"])


@pytest.mark.parametrize(
    ("line", "speaks"),
    [
        ("ip saddr 192.168.1.11 tcp dport 32768-60999 ct state new drop", True),
        ("tcp dport { 22, 29500 } reject", True),
        ("ip saddr @friends drop", True),
        ("counter drop", True),
        ("ip saddr 192.168.7.0/24 drop", False),
        ("tcp dport { 22, 80-90 } drop", False),
        ("udp dport 29500 drop", False),
        ("ct state invalid drop", False),
        ("-A INPUT -s 192.168.1.0/24 -p tcp -m tcp --dport 29500 -j DROP", True),
        ("-A INPUT -p tcp -m multiport --dports 80,443 -j DROP", False),
        ("-A INPUT ! -s 10.0.0.0/8 -j DROP", True),
        ("deny 80/tcp", False),
        ("deny 29500/tcp", True),
    ],
)
def test_field_01_which_of_the_owners_rules_could_be_the_one(line, speaks):
    assert rules.concerns(line, [FOUR, WIDE]) is speaks


LISTED = """table inet owner {
  set friends {
    type ipv4_addr
  }
  chain bad {
    tcp dport 1-65535 reject
  }
  chain i {
    type filter hook input priority 0; policy accept;
    ct state invalid drop
    ip saddr 192.168.1.11 jump bad
  }
}
"""


def test_field_01_nftables_names_the_rule_that_blocks():
    chains = [{"chain": {"family": "inet", "table": "owner", "name": "bad"}}, base("i", table="owner")]
    drops = {"rule": {"family": "inet", "table": "owner", "chain": "i", "handle": 1, "expr": [{"drop": None}]}}
    run = script(nft_version="1.0.6", nft_j=json.dumps({"nftables": [*chains, drops]}), nft_list=LISTED)
    assert nftables.Nftables(run, MARK).blocking_rules([FOUR]) == ["inet owner i: tcp dport 1-65535 reject"]
    closed = script(
        nft_version="1.0.6",
        nft_j=json.dumps({"nftables": [base("i", "drop", "owner")]}),
        nft_list=LISTED.replace("y accept", "y drop").replace("1-65535", "22"),
    )
    assert nftables.Nftables(closed, MARK).blocking_rules([FOUR]) == ["inet owner i: policy drop"]


def test_field_01_iptables_and_ufw_name_the_rule_that_blocks():
    listing = "-P INPUT DROP\n-N bad\n-A INPUT -p tcp -j bad\n-A bad -s 192.168.1.11/32 -j REJECT\n"
    assert iptables.Iptables(script(iptables_w_S=listing), MARK).blocking_rules([FOUR]) == [
        "-A bad -s 192.168.1.11/32 -j REJECT"
    ]
    assert iptables.Iptables(script(iptables_w_S="-P INPUT DROP\n"), MARK).blocking_rules([FOUR]) == ["-P INPUT DROP"]
    told = "Status: active\nDefault: deny (incoming), allow (outgoing)\n"
    run = script(ufw_version="0.36", ufw_show_added="ufw allow 22/tcp\n", ufw_status_verbose=told)
    assert ufw.Ufw(run, MARK).blocking_rules([FOUR]) == ["Default: deny (incoming)"]


# ufw

ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw deny 29500/tcp
ufw allow from 192.168.1.11 to any port 29500 proto tcp comment 'nanochat.ddp:d4,e5'
ufw allow from 10.0.0.9 to any port 80 proto tcp comment 'hi there'
"""


def change_ufw(added, *wanted):
    return ufw.Ufw(script(ufw_version="0.36", ufw_show_added=added), MARK).change(list(wanted))


def test_ufw_prepends_so_that_a_denial_does_not_win():
    change = change_ufw("ufw deny 29500/tcp\n", FOUR)
    assert [step.argv[:3] for step in change.steps] == [["ufw", "prepend", "allow"]]
    assert change.steps[0].argv[-2:] == ["comment", MARK]


def test_ufw_shares_a_rule_with_another_job_and_leaves_it_to_that_job():
    assert change_ufw(ADDED, FOUR).steps == []
    [step] = change_ufw(ADDED).steps
    assert step.argv == ["ufw", *ufw.spec_of(FOUR), "comment", "nanochat.ddp:e5"]


def test_ufw_joins_the_rule_of_another_job():
    [step] = change_ufw(ADDED.replace("d4,e5", "e5"), FOUR).steps
    assert step.argv[-1] == "nanochat.ddp:d4,e5"


def test_ufw_removes_what_is_no_longer_wanted():
    change = change_ufw(ADDED.replace("d4,e5", "d4"), WIDE)
    assert ["ufw", "delete", *ufw.spec_of(FOUR)] in [step.argv for step in change.steps]
    assert change.before == [FOUR.text()]
    assert change.after == [WIDE.text()]


def test_ufw_never_takes_the_owners_rule_for_its_own():
    own = "ufw allow from 192.168.1.11 to any port 29500 proto tcp\n"
    assert change_ufw(own, FOUR).steps == []
    assert change_ufw(own).steps == []


@pytest.mark.parametrize(
    ("status", "added", "blocks"),
    [
        ("Status: inactive\n", "", False),
        ("Status: active\nDefault: deny (incoming), allow (outgoing)\n", "", True),
        ("Status: active\nDefault: allow (incoming), allow (outgoing)\n", "ufw allow 22\n", False),
        ("Status: active\nDefault: allow (incoming), allow (outgoing)\n", "ufw deny 29500/tcp\n", True),
        ("Status: active\nDefault: allow (incoming), allow (outgoing)\n", "ufw deny 23/tcp\n", False),
        ("Status: active\nDefault: allow (incoming), allow (outgoing)\n", "ufw deny from 203.0.113.7\n", False),
    ],
)
def test_ufw_is_in_force_where_it_may_block(status, added, blocks):
    run = script(ufw_version="0.36", ufw_status_verbose=status, ufw_show_added=added)
    assert ufw.Ufw(run, MARK).in_force([FOUR]) is blocks


# iptables


F2B = "-P INPUT ACCEPT\n-N f2b-sshd\n-A INPUT -p tcp -m multiport --dports 22 -j f2b-sshd\n"
IN = "-P INPUT ACCEPT\n-A INPUT "


@pytest.mark.parametrize(
    ("listing", "blocks"),
    [
        ("-P INPUT ACCEPT\n", False),
        ("-P INPUT DROP\n", True),
        (IN + "-p tcp -j REJECT\n", True),
        (IN + "-p udp -j REJECT\n", False),
        (IN + "-p tcp -m tcp --dport 25 -j DROP\n", False),
        (IN + "-p tcp -m multiport --dports 80,29000:30000 -j DROP\n", True),
        (IN + "-s 10.0.0.0/8 -j DROP\n", False),
        (IN + "! -s 10.0.0.0/8 -j DROP\n", True),
        (IN + "! -s 192.168.1.0/24 -j DROP\n", False),
        (IN + "-i docker0 -j DROP\n", False),
        (IN + "! -i lo -d 127.0.0.0/8 -j DROP\n", False),
        (IN + "-i eth+ -j DROP\n", True),
        (IN + "-d 172.17.0.2/32 ! -i docker0 -j DROP\n", False),
        (IN + "-m conntrack --ctstate INVALID -j DROP\n", False),
        (IN + "-p tcp -m tcp --tcp-flags FIN,SYN FIN,SYN -j DROP\n", False),
        (IN + "-m limit --limit 5/min -j DROP\n", True),
        (IN + "-m set --match-set f2b-recidive src -j DROP\n", False),
        (IN + "-m set --match-set others src -j DROP\n", True),
        ("-P INPUT ACCEPT\n-N mine\n-A INPUT -j mine\n-A mine -j RETURN\n", False),
        ("-P INPUT ACCEPT\n-N mine\n-A INPUT -j mine\n-A mine -s 1.2.3.4/32 -j DROP\n", False),
        ("-P INPUT ACCEPT\n-N mine\n-A INPUT -j mine\n-A mine -s 192.168.1.11/32 -j DROP\n", True),
        (F2B + "-A f2b-sshd -s 1.2.3.4/32 -j REJECT\n-A f2b-sshd -j RETURN\n", False),
        ("-P INPUT ACCEPT\n-N KUBE-FIREWALL\n-A INPUT -j KUBE-FIREWALL\n-A KUBE-FIREWALL -j DROP\n", False),
        ("-P INPUT ACCEPT\n-N mine\n-A INPUT -j mine\n", False),
        ("-P INPUT ACCEPT\n-N a\n-N b\n-A INPUT -j a\n-A a -g b\n-A b -j a\n", False),
        ("-P INPUT ACCEPT\n-P FORWARD DROP\n-A FORWARD -j DROP\n", False),
        ("", False),
    ],
)
def test_field_30_iptables_blocks_only_where_the_peers_packets_may_end(listing, blocks):
    assert bool(iptables.dropping_lines(listing, [PACKETS])) is blocks


def test_field_30_a_ban_of_fail2bans_is_told_and_left_alone():
    listing = F2B.replace("-m multiport --dports 22 ", "") + "-A f2b-sshd -s 192.168.1.11/32 -j REJECT\n"
    result = apply(script(iptables_w_S=listing), request())
    assert (result["changed"], result["commands"]) == (False, [])
    assert result["foreign"] == ["iptables -A f2b-sshd -s 192.168.1.11/32 -j REJECT"]


@pytest.mark.parametrize(
    "words", ["Address family not supported by protocol", "Table does not exist (do you need to insmod?)"]
)
def test_a_kernel_without_ipv6_has_no_ip6tables(words):
    run = script(iptables_w_S="-P INPUT DROP\n", ip6tables_w_S=(3, "", f"can't initialize ip6tables table: {words}"))
    assert iptables.Iptables(run, MARK).change([FOUR]).after == [FOUR.text()]
    assert iptables.Iptables(run, MARK).change([]).steps == []


def test_old_tables_beside_iptables_nft_are_opened_too():
    answers = {"iptables_w_S": "-P INPUT ACCEPT\n", "iptableslegacy_w_S": "-P INPUT DROP\n"}
    change = iptables.Iptables(script(iptables_version="iptables v1.8.9 (nf_tables)", **answers), MARK).change([FOUR])
    assert [step.argv[0] for step in change.steps] == ["iptables-legacy"]
    assert not change.persistent
    old = iptables.Iptables(script(iptables_version="iptables v1.8.9 (legacy)", **answers), MARK)
    assert old.change([FOUR]).steps == []  # the tool itself is the old one


def own_line(rule):
    return "-A INPUT " + " ".join(iptables.words_of(rule, 32, f'"{MARK}"')) + "\n"


def test_iptables_adds_only_what_is_missing_and_removes_what_is_too_much():
    listing = "-P INPUT DROP\n" + own_line(FOUR)
    run = script(iptables_w_S=listing, ip6tables_w_S="-P INPUT ACCEPT\n")
    change = iptables.Iptables(run, MARK).change([WIDE, SIX])
    assert [step.argv[2] for step in change.steps] == ["-I", "-D"]
    assert change.after == [WIDE.text()]  # nothing blocks IPv6
    assert not change.persistent


SAVED = "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n*filter\n:INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n"


def test_saved_rules_get_ours_at_the_head_of_input_and_lose_them_without_a_trace():
    with_it = iptables.saved_with(SAVED, MARK, [iptables.words_of(FOUR, 32, MARK)])
    lines = with_it.splitlines()
    assert lines[lines.index(":INPUT DROP [0:0]") + 1].endswith("-j ACCEPT")
    assert MARK in lines[lines.index(":INPUT DROP [0:0]") + 1]
    assert iptables.saved_with(with_it, MARK, []) == SAVED


def test_saved_rules_without_a_filter_table_stay_as_they_are():
    nat = SAVED.partition("*filter")[0]
    assert iptables.saved_with(nat, MARK, [iptables.words_of(FOUR, 32, MARK)]) == nat


def test_iptables_survives_a_reboot_where_saved_rules_are_loaded(tmp_path):
    (tmp_path / "etc/iptables").mkdir(parents=True)
    (tmp_path / "etc/iptables/rules.v4").write_text(SAVED)
    run = script(iptables_w_S="-P INPUT DROP\n", systemctl_isenabled_netfilterpersistent="enabled\n")
    change = iptables.Iptables(run, MARK, str(tmp_path)).change([FOUR])
    assert change.persistent
    assert change.steps[-1].path.endswith("rules.v4")
    assert MARK in change.steps[-1].text


# nftables


def base(name="input", policy="accept", table="filter", family="inet", hook="input"):
    chain = {
        "family": family,
        "table": table,
        "name": name,
        "type": "filter",
        "hook": hook,
        "prio": 0,
        "policy": policy,
    }
    return {"chain": chain}


def nft_rule(*expr, chain="input", family="inet", table="filter", **more):
    return {"rule": {"family": family, "table": table, "chain": chain, "expr": list(expr), "handle": 7, **more}}


def ruleset(*objects, **more):
    return nftables.Ruleset(json.dumps({"nftables": list(objects)}), **more)


JUMP = {"jump": {"target": "bad"}}
BAD = {"chain": {"family": "inet", "table": "filter", "name": "bad"}}


@pytest.mark.parametrize(
    ("objects", "blocks"),
    [
        ([base()], False),
        ([base(policy="drop")], True),
        ([base(hook="output", policy="drop")], False),
        ([base(), nft_rule({"accept": None})], False),
        ([base(), nft_rule({"reject": {}})], True),
        ([base(), BAD, nft_rule(JUMP)], False),
        ([base(), BAD, nft_rule(JUMP), nft_rule({"drop": None}, chain="bad")], True),
        ([base(), nft_rule({"vmap": {"key": {}, "data": {"set": [["new", {"drop": None}]]}}})], True),
        (
            [
                base(),
                {"map": {"family": "inet", "table": "filter", "name": "m", "elem": [[1, {"drop": None}]]}},
                nft_rule({"vmap": {"key": {}, "data": "@m"}}),
            ],
            True,
        ),
        ([base("INPUT", "drop", "filter", "ip")], False),  # iptables' own
        ([base("filter_INPUT", "drop", "firewalld")], False),
    ],
)
def test_nftables_blocks_in_native_chains_where_a_packet_may_end(objects, blocks):
    assert bool(ruleset(*objects).blocking([PACKETS])) is blocks


def met(op, right, **left):
    return {"match": {"op": op, "left": left, "right": right}}


def payload(protocol, field):
    return {"payload": {"protocol": protocol, "field": field}}


def named_set(name, *elements):
    return {"set": {"family": "inet", "table": "filter", "name": name, "elem": list(elements)}}


SADDR, DPORT, STATE = payload("ip", "saddr"), payload("tcp", "dport"), {"ct": {"key": "state"}}
NETWORK = {"prefix": {"addr": "192.168.0.0", "len": 16}}
FIB = {"fib": {"result": "oif", "flags": ["saddr", "iif"]}}
SYN_FIN = {"&": [payload("tcp", "flags"), {"|": ["fin", "syn"]}]}


@pytest.mark.parametrize(
    ("conditions", "blocks"),
    [
        ([met("==", 22, **DPORT)], False),
        ([met("==", {"range": [29000, 30000]}, **DPORT)], True),
        ([met("!=", {"set": [22, 29500]}, **DPORT)], False),
        ([met("!=", 22, **DPORT)], True),
        ([met("==", 29500, **payload("udp", "dport"))], False),
        ([met("==", "192.168.1.11", **SADDR)], True),
        ([met("==", NETWORK, **SADDR), met("==", 22, **DPORT)], False),
        ([met("!=", NETWORK, **SADDR)], False),
        ([met("==", {"range": ["192.168.1.1", "192.168.1.20"]}, **SADDR)], True),
        ([met("==", {"range": ["192.168.1.12", "192.168.1.20"]}, **SADDR)], False),
        ([met("==", {"range": ["192.168.1.12", "192.168.1.20"]}, **payload("ip", "daddr"))], True),
        ([met("==", "@bad", **SADDR)], False),
        ([met("==", "@banned", **SADDR)], True),
        ([met("==", "@unknown", **SADDR)], True),
        ([met("==", "fd00::11", **payload("ip6", "saddr"))], False),
        ([met("==", "172.17.0.2", **payload("ip", "daddr")), met("!=", "docker0", meta={"key": "iifname"})], False),
        ([met("==", "192.168.1.10", **payload("ip", "daddr"))], True),
        ([met("==", "br-*", meta={"key": "iifname"})], False),
        ([met("==", "eth*", meta={"key": "iifname"})], True),
        ([met("==", "tcp", meta={"key": "l4proto"})], True),
        ([met("==", "ipv6", meta={"key": "nfproto"})], False),
        ([met("in", "invalid", **STATE)], False),
        ([met("in", "new", **STATE)], True),
        ([met("==", False, **FIB)], False),
        ([met("==", {"|": ["fin", "syn"]}, **SYN_FIN)], False),
        ([met("==", "syn", **SYN_FIN)], True),
        ([met("==", 1, meta={"key": "mark"})], True),
        ([{"vmap": {"key": STATE, "data": {"set": [["invalid", {"drop": None}], ["new", {"accept": None}]]}}}], False),
        ([{"vmap": {"key": DPORT, "data": {"set": [[22, {"accept": None}], [29500, {"drop": None}]]}}}], True),
    ],
)
def test_field_30_nftables_blocks_only_where_the_peers_packets_may_end(conditions, blocks):
    sets = [named_set("bad", "1.2.3.4", {"elem": {"val": "5.6.7.8", "expires": 3}}), named_set("banned", FOUR.peer)]
    verdict = [] if "vmap" in conditions[0] else [{"drop": None}]
    rule = nft_rule(*conditions, *verdict)
    assert bool(ruleset(base(), *sets, rule).blocking([PACKETS])) is blocks


@pytest.mark.parametrize("table", ["f2b-table", "docker-bridges", "kube-proxy", "libvirt_network", "netavark"])
@pytest.mark.parametrize("hook", ["input", "prerouting"])
def test_field_30_tables_of_other_programs_are_left_alone(table, hook):
    objects = [base("chain", table=table, hook=hook), nft_rule({"drop": None}, chain="chain", table=table)]
    assert ruleset(*objects).blocking([PACKETS]) == []
    assert ruleset(*objects).blocking([PACKETS], of_others=True) == [("inet", table, "chain")]
    told = apply(script(nft=json.dumps({"nftables": objects})), request())
    assert (told["changed"], told["foreign"]) == (False, [f"nft chain inet {table} chain"])


def test_a_table_that_only_looks_like_iptables_is_native():
    assert ruleset(base("INPUT", "drop", "filter", "ip"), iptables=False).blocking([PACKETS]) == [
        ("ip", "filter", "INPUT")
    ]


@pytest.mark.parametrize(
    ("version", "opened"), [("v1.8.9 (nf_tables)", "iptables"), ("v1.8.9 (legacy)", "nftables+iptables")]
)
def test_a_table_of_iptables_is_opened_by_the_tool_that_keeps_it(version, opened):
    answers = {
        f"{tool}_{asked}": told
        for tool in ("iptables", "ip6tables")
        for asked, told in (("version", version), ("w_S", "-P INPUT DROP\n"))
    }
    nft = json.dumps({"nftables": [base("INPUT", "drop", "filter", "ip")]})
    assert apply(script(nft=nft, **answers), request())["backend"] == opened


@pytest.mark.parametrize("iptables", [True, False])
def test_what_firewalld_keeps_in_nftables_is_its_own(iptables):
    assert ruleset(base("filter_INPUT", "drop", "firewalld"), iptables=iptables).blocking([PACKETS]) == []


def change_nft(objects, *wanted, root="/nowhere"):
    return nftables.Nftables(script(nft=json.dumps({"nftables": objects})), MARK, root).change(list(wanted))


def test_nftables_goes_into_every_chain_that_may_drop():
    both = [base(policy="drop"), base("late", "drop", "other", "ip")]
    change = change_nft(both, FOUR, SIX)
    chains = [tuple(step.argv[3:6]) for step in change.steps]
    assert chains.count(("inet", "filter", "input")) == 2
    assert chains.count(("ip", "other", "late")) == 1  # no IPv6 in a chain of IPv4
    assert not change.persistent
    assert "reboot" in change.note


def test_nftables_leaves_its_rules_where_they_are_and_deletes_the_rest():
    def own(port):
        source = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": FOUR.peer}}
        ports = {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}}, "right": port}}
        return nft_rule(source, ports, {"accept": None}, comment=MARK)

    assert change_nft([base(policy="drop"), own(29500)], FOUR).steps == []
    [step] = change_nft([base(policy="drop"), own(29500), own({"range": [1, 2]})], FOUR).steps
    assert step.argv == ["nft", "delete", "rule", "inet", "filter", "input", "handle", "7"]


def nft_at_boot(tmp_path, check=(0, "", "")):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nftables.conf").write_text("flush ruleset\n")
    answers = {"nft_c": check, "systemctl_isenabled_nftables": "enabled\n"}
    run = script(nft=json.dumps({"nftables": [base(policy="drop")]}), **answers)
    return nftables.Nftables(run, MARK, str(tmp_path)).change([FOUR])


def test_nftables_survives_a_reboot_where_its_file_is_loaded(tmp_path):
    change = nft_at_boot(tmp_path)
    assert change.persistent
    assert change.steps[-1].text.startswith("flush ruleset\n# BEGIN nanochat.ddp:d4\ninsert rule inet filter input")


def test_nftables_writes_no_file_at_which_a_boot_would_fail(tmp_path):
    change = nft_at_boot(tmp_path, (1, "", "x.nft:3:1: Error: No such file or directory"))
    assert not change.persistent
    assert "does not define the chains" in change.note
    assert not any(step.path for step in change.steps)


def test_input_chains_are_read_from_a_file_without_root():
    text = "table inet fw { # c\n chain in { type filter hook input priority 0; policy drop; }\n chain out {\n}\n}\n"
    assert nftables.input_chains(text) == [("inet", "fw", "in")]


# firewalld

ZONES = """block
  target: %%REJECT%%
  interfaces:
  sources:
  ports:
  rich rules:

home
  target: default
  interfaces:
  sources: 10.7.0.0/16
  ports: 1025-65535/tcp 53/udp
  rich rules:

public (active)
  target: default
  interfaces: enp4s0
  sources:
  ports:
  rich rules:
\trule family="ipv4" source address="10.0.0.1" reject
trusted
  target: ACCEPT
  interfaces: tun0
"""


def change_firewalld(zones, permanent, *wanted, route="dev enp4s0 src 192.168.1.10"):
    answers = {
        "firewallcmd_state": "running\n",
        "firewallcmd_listallzones": zones,
        "firewallcmd_getdefaultzone": "block\n",
        "firewallcmd_permanent_listallzones": permanent,
        "ip_route_get": route,
    }
    run = script(**{key.replace("-", ""): value for key, value in answers.items()})
    return firewalld.Firewalld(run, MARK).change(list(wanted))


def with_rich(rule):
    return ZONES.replace("reject\n", f"reject\n\t{firewalld.rich_rule(rule, MARK)}\n")


def test_firewalld_puts_a_rule_in_the_zone_of_the_interface_now_and_for_good():
    change = change_firewalld(ZONES, ZONES, FOUR)
    assert [step.argv[1:3] for step in change.steps] == [
        ["--zone=public", f"--add-rich-rule={firewalld.rich_rule(FOUR, MARK)}"],
        ["--permanent", "--zone=public"],
    ]
    assert change.persistent


def test_a_firewalld_that_runs_is_opened():
    zones = {"firewallcmd_listallzones": ZONES, "firewallcmd_permanent_listallzones": ZONES}
    run = script(firewallcmd_state="running\n", firewallcmd_getdefaultzone="public\n", **zones)
    result = apply(run, request())
    assert (result["backend"], result["active"], len(result["commands"])) == ("firewalld", True, 2)


def test_firewalld_brings_each_of_the_two_rule_sets_to_what_is_wanted():
    assert change_firewalld(with_rich(FOUR), with_rich(FOUR), FOUR).steps == []
    [step] = change_firewalld(with_rich(FOUR), ZONES, FOUR).steps
    assert step.argv[1] == "--permanent"
    removed = change_firewalld(with_rich(FOUR), with_rich(FOUR))
    assert [step.argv[-1].split("=")[0] for step in removed.steps] == ["--remove-rich-rule"] * 2


def test_firewalld_does_nothing_where_the_zone_is_open():
    assert change_firewalld(ZONES, ZONES, rules.Rule("10.7.1.2", 29500, 29500)).steps == []
    assert change_firewalld(ZONES, ZONES, FOUR, route="dev tun0").steps == []


def test_firewalld_knows_its_rules_from_those_of_other_jobs_and_of_the_owner():
    assert firewalld.own_rule(firewalld.rich_rule(WIDE, MARK), MARK) == WIDE
    assert firewalld.own_rule(firewalld.rich_rule(WIDE, MARK), MARK + "2") is None
    assert -32768 <= firewalld.priority(MARK) < 0


def test_a_denial_of_other_packets_does_not_close_an_open_zone():
    zones = ZONES.replace("enp4s0\n  sources:\n  ports:", "enp4s0\n  sources:\n  ports: 1025-65535/tcp")
    assert change_firewalld(zones, zones, FOUR).steps == []
    closed = zones.replace("10.0.0.1", "192.168.1.0/24")
    assert len(change_firewalld(closed, closed, FOUR).steps) == 2


def test_rules_of_a_stopped_firewalld_are_taken_away_as_well():
    offline = {"firewallofflinecmd_version": "1.3", "firewallofflinecmd_listallzones": with_rich(FOUR)}
    run = script(firewallcmd_state=(252, "", "not running"), **offline)
    [step] = firewalld.Firewalld(run, MARK).change([]).steps
    assert step.argv == [
        "firewall-offline-cmd",
        "--zone=public",
        f"--remove-rich-rule={firewalld.rich_rule(FOUR, MARK)}",
    ]


# Closing what is left over


class Host:
    """A machine whose firewalls do what they are told, as far as these tests tell them."""

    def __init__(self, added="", listing="-P INPUT DROP\n"):
        self.added, self.listing = added, listing

    def __call__(self, argv):
        if argv[:2] == ["ufw", "show"]:
            return 0, self.added, ""
        if argv[:2] == ["ufw", "delete"]:
            kept = [line for line in self.added.splitlines(True) if " ".join(argv[2:]) not in line]
            self.added = "".join(kept)
        elif argv[0] == "ufw" and "comment" in argv:
            lines = self.added.splitlines(True)
            words = " ".join(argv[1 : argv.index("comment")])
            self.added = "".join(f"ufw {words} comment '{argv[-1]}'\n" if words in line else line for line in lines)
        elif argv[:3] == ["iptables", "-w", "-S"]:
            return 0, self.listing, ""
        elif argv[:3] == ["iptables", "-w", "-D"]:
            self.listing = "".join(x for x in self.listing.splitlines(True) if iptables.split(x)[2:] != argv[4:])
        elif argv[0] != "ufw":
            return 127, "", "not installed"
        return 0, "", ""


def left_over(**more):
    return request(**{"mark": rules.MARK, "wanted": [], "present": False, "check": False, **more})


def test_field_29_the_rules_of_earlier_runs_go_and_those_of_a_live_one_stay():
    e5 = own_line(WIDE).replace("d4", "e5")
    host = Host(ADDED, "-P INPUT DROP\n" + own_line(FOUR) + e5 + "-A INPUT -i lo -j ACCEPT\n")
    result = apply(host, left_over(keep=("e5",)))
    assert (result["changed"], result["closed"]) == (True, ["d4"])
    assert "nanochat.ddp:e5'" in host.added
    assert host.listing == "-P INPUT DROP\n" + e5 + "-A INPUT -i lo -j ACCEPT\n"
    assert not apply(host, left_over(keep=("e5",)))["changed"]
    assert apply(host, left_over())["closed"] == ["e5"]
    assert "nanochat.ddp" not in host.added + host.listing
    assert "hi there" in host.added


def test_field_29_a_firewalld_is_asked_for_the_jobs_that_are_known():
    answers = {"firewallcmd_state": "running\n", "firewallcmd_listallzones": with_rich(FOUR)}
    run = script(**answers, firewallcmd_getdefaultzone="public\n", firewallcmd_permanent_listallzones=with_rich(FOUR))
    found = apply(run, left_over(check=True, known=("d8", "d4")))
    assert (found["closed"], len(found["commands"])) == (["d4"], 2)
    assert not apply(run, left_over(check=True, known=("d8",)))["changed"]


def test_field_29_blocks_of_all_jobs_are_found_in_the_file_that_is_loaded_at_boot(tmp_path):
    (tmp_path / "etc").mkdir()
    text = rules.with_block("flush ruleset\n", MARK, ["one"])
    (tmp_path / "etc/nftables.conf").write_text(rules.with_block(text, rules.MARK + "e5", ["two"]))
    found = nftables.Nftables(script(nft='{"nftables": []}'), rules.MARK, str(tmp_path)).names([])
    assert found == {"d4", "e5"}


# Choosing


def nft_input(policy):
    return json.dumps({"nftables": [base(policy=policy)]})


def request(**more):
    return FirewallRequest(**{"mark": MARK, "wanted": [FOUR], "present": True, "check": True, **more})


def test_nothing_is_done_where_nothing_blocks():
    result = apply(script(nft=nft_input("accept"), iptables_w_S="-P INPUT ACCEPT\n"), request())
    assert (result["backend"], result["active"], result["changed"], result["commands"]) == ("none", False, False, [])
    assert "nothing on this host blocks" in result["message"]


def test_a_native_drop_beside_ufw_is_opened_too():
    run = script(
        ufw_version="0.36",
        ufw_status_verbose="Status: active\nDefault: deny (incoming)\n",
        ufw_show_added="",
        nft=nft_input("drop"),
        iptables_w_S="-P INPUT DROP\n",
    )
    result = apply(run, request())
    assert result["backend"] == "ufw+nftables"
    assert len(result["commands"]) == 2


def test_field_02_without_root_nothing_is_changed_and_the_owner_gets_the_commands(monkeypatch):
    monkeypatch.setattr(ufw.Ufw, "suspected", lambda self: True)
    run = script()
    result = apply(run, request(root=False, check=False))
    assert not result["changed"]
    assert result["needs_root"]
    assert result["commands"] == [
        "sudo ufw prepend allow from 192.168.1.11 to any port 29500 proto tcp comment nanochat.ddp:d4"
    ]
    assert {call[0] for call in run.calls} <= {"systemctl"}  # only asked what is active


@pytest.mark.parametrize(
    ("tool", "command"), [("nft", "sudo nft insert rule "), ("iptables", "sudo iptables -I INPUT 1 ")]
)
def test_field_02_where_no_firewall_shows_itself_the_owner_gets_the_commands_for_closed_ports(tool, command):
    result = apply(script(**{f"{tool}_version": "1"}), request(root=False))
    assert not result["needs_root"] and result["commands"] == []
    assert result["if_closed"][0].startswith(command)
    assert apply(script(), request(root=False))["if_closed"] == []


def test_field_02_a_root_that_may_not_is_treated_as_none(monkeypatch):
    monkeypatch.setattr(nftables.Nftables, "suspected", lambda self: True)
    run = script(nft___version="nftables", nft=(1, "", "Operation not permitted (you must be root)"))
    result = apply(run, request(check=False))
    assert result["needs_root"]
    assert "not permitted" in result["message"]
    assert result["commands"][0].startswith("sudo nft insert rule ")


def test_field_02_without_root_the_owner_gets_the_commands_that_close_again(monkeypatch):
    monkeypatch.setattr(ufw.Ufw, "suspected", lambda self: True)
    result = apply(script(), request(root=False, present=False))
    assert result["commands"] == ["sudo ufw delete allow from 192.168.1.11 to any port 29500 proto tcp"]


# Files of the owner's


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "rules.v4"
    path.write_text("old\n")
    path.chmod(0o640)
    carry_out_step(script(), FirewallStep(["sh"], str(path), "new \udce4\n"))
    assert path.read_bytes() == b"new \xe4\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_stays_and_is_named(tmp_path, monkeypatch):
    path = tmp_path / "rules.v4"
    path.write_text("old\n")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(rules.FirewallError, match=f"cannot write {path}: No space left"):
        carry_out_step(script(), FirewallStep(["sh"], str(path), "new\n"))
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


# The recipe of CONTRIBUTING.md


def test_a_new_backend_is_one_class(monkeypatch):
    monkeypatch.setattr(interface.FirewallBackend, "kinds", dict(interface.FirewallBackend.kinds))

    class Gate(interface.FirewallBackend):
        """A made-up firewall that holds one rule a line."""

        name = "gate"
        order = 15
        writes = ("iptables",)

        def in_force(self, wanted):
            return self.has_program("gate")

        def lines(self):
            return self.tool("gate", "list").split()

        def change(self, wanted):
            after = [f"{rule.peer}:{rule.low}" for rule in wanted]
            steps = [FirewallStep(["gate", "open", line]) for line in after if line not in self.lines()]
            return rules.Change(steps, self.lines(), after, True)

        def blocking_rules(self, wanted):
            return ["gate is shut"]

        def names(self, known):
            return set(known)

        def suspected(self):
            return True

        def suggested(self, wanted, present):
            return self.change(wanted).steps

    held: list[str] = []

    def run(argv):
        if argv[0] == "iptables":
            return 0, "-P INPUT DROP\n", ""
        if argv[0] != "gate":
            return 127, "", ""
        if argv[1] == "open":
            held.append(argv[2])
        return 0, " ".join(held), ""

    result = apply(run, FirewallRequest(MARK, [FOUR], present=True))
    assert (result["changed"], result["backend"], result["blocking"]) == (True, "gate", ["gate is shut"])
    assert held == ["192.168.1.11:29500"] and not apply(run, FirewallRequest(MARK, [FOUR], present=True))["changed"]
    assert apply(run, FirewallRequest(MARK, [FOUR], present=True, backend="gate", root=False))["commands"] == []


def test_a_backend_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(rules.FirewallError, match=r"backend is gate; it must be one of: auto, .*ufw.*, none"):
        apply(script(), FirewallRequest(MARK, [FOUR], present=True, backend="gate"))
