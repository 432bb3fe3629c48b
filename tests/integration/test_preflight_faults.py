# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbook preflight between hosts with real interfaces and firewalls, with faults made for real."""

from __future__ import annotations

import json
import re

# Tests run beside other load, whose findings are not theirs.
SURROUNDINGS = {"host-busy", "other-training", "memory-tight", "name-is-loopback", "link-slow"}


def preflight(lan, *words, **settings):
    """(exit code, findings by code, the document)."""
    stage = lan.stage(**{"ddp_threads": 1, **settings})
    told = stage.play("nanochat.ddp.preflight", "-e", "ddp_json=true", *words, code=None)
    match = re.search(r"^\{\n.*?^\}$", told, re.S | re.M)
    assert match, told
    document = json.loads(match[0])
    found = {one["code"]: one for one in document["findings"] if one["code"] not in SURROUNDINGS}
    return stage.code, found, document


def other_interface(lan, number, **files):
    """This host's NIC is another one, as far as the kernel tells: files of its folder in /sys, a folder where there is no text."""
    folder = lan.folder / f"interfaces{number}"
    for name in ("lo", "eth0"):
        (folder / name).mkdir(parents=True)
        for file in ("type", "operstate", "flags", "mtu", "address", "uevent"):
            (folder / name / file).write_text(lan.run(number, "cat", f"/sys/class/net/{name}/{file}"))
    for file, text in files.items():
        if text is None:
            (folder / "eth0" / file).mkdir()
        else:
            (folder / "eth0" / file).write_text(text)
    lan.preludes[number] += f" mount --bind {folder} /sys/class/net;"


def test_healthy_hosts_give_no_finding_and_nothing_is_left(lan):
    """By IPv6; the tests of faults reach each other by IPv4."""
    other_interface(lan, 0, device=None, speed="1000\n")
    for number in range(2):
        lan.run(number, "ip", "addr", "add", f"fd09::{number + 1}/64", "dev", "eth0", "nodad")
    code, found, document = preflight(lan, ddp_address="{{ {'h0': 'fd09::1', 'h1': 'fd09::2'}[inventory_hostname] }}")
    assert code == 0
    # A test beside this one may have an orphan on this machine.
    assert set(found) <= {"stale-ranks"}
    assert [(link["host"], link["peer"]) for link in document["links"]] == [("h0", "h1"), ("h1", "h0")]
    assert all(link["bandwidth_mbit"] > 10 and link["nic"] == "eth0" for link in document["links"])
    assert not any((lan.folder / name).exists() for name in ("h0", "h1"))


def test_field_01_a_dropped_data_port_is_named_with_its_firewall_and_the_commands(lan):
    rules = "table inet f {\n chain i {\n type filter hook input priority 0;\n ct state new tcp dport 32768-60999 drop\n }\n}\n"
    lan.run(1, "nft", "-f", "-", text=rules)
    code, found, _document = preflight(lan)
    assert code != 0
    assert set(found) == {"port-blocked"}
    one = found["port-blocked"]
    assert (one["host"], one["peer"]) == ("h1", "h0")
    assert "no answer (dropped); nftables is active on h1" in one["seen"]
    assert "sudo nft insert rule inet f i ip saddr 10.9.0.1 tcp dport 32768-60999 accept" in one["remedy"]
    assert "nanochat" not in lan.run(1, "nft", "list", "ruleset")


def test_field_06_field_25_orphans_low_limits_and_a_radio_are_named(lan):
    other_interface(lan, 1, device=None, wireless=None)
    # The second host's login allows little.
    lan.preludes[1] += " ulimit -n 100; ulimit -f 20480;"
    # Nobody waits for it any more, and it carries the mark of a session that is over.
    lan.run(0, "sh", "-c", f"NANOCHAT_DDP_SESSION=old setsid sleep 300 >/dev/null 2>&1 & echo $! >{lan.folder}/orphan")
    orphan = (lan.folder / "orphan").read_text().strip()
    _code, found, document = preflight(lan)
    lan.run(0, "kill", orphan)
    assert found["nic-wifi"]["host"] == "h1"
    assert f"process {orphan} of " in found["stale-ranks"]["seen"]
    low = [one for one in document["findings"] if one["code"] == "ulimit-low"]
    assert {one["host"] for one in low} == {"h1"}
    assert "100 open files" in low[0]["seen"] and "files of 10485760 bytes" in low[1]["seen"]
