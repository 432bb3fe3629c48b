# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_port_range on hosts with a firewall: fewer local ports, no more of them opened, and all given back."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import WALL, Lan


@pytest.fixture
def lan(lan, tmp_path):
    for number in (0, 1):
        # Settings that outlive a reboot go to a folder of the test, not of this machine.
        (tmp_path / f"sysctl{number}").mkdir()
        lan.preludes[number] += f"mount --bind {tmp_path}/sysctl{number} /etc/sysctl.d;"
        lan.run(number, "nft", "-f", "-", text=WALL)
    return lan


def local_ports(lan: Lan) -> list[list[str]]:
    return [lan.run(number, "cat", "/proc/sys/net/ipv4/ip_local_port_range").split() for number in (0, 1)]


def network(lan: Lan, ports: str, *words: str) -> str:
    done = lan.playbook("nanochat.ddp.train", "--tags", "network", *words, ddp_port_range=ports)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_field_01_only_the_narrowed_ports_are_opened_and_reset_gives_all_back(lan, tmp_path):
    before, walls = local_ports(lan), [lan.run(number, "nft", "list", "ruleset") for number in (0, 1)]
    assert before == [["32768", "60999"]] * 2

    assert "changed=2" in network(lan, "40000-40999", "--check")
    assert local_ports(lan) == before
    network(lan, "40000-40999")
    assert local_ports(lan) == [["40000", "40999"]] * 2
    opened = lan.run(0, "nft", "list", "ruleset")
    assert "40000-40999" in opened and "29500" in opened and "32768" not in opened
    assert network(lan, "40000-40999").count("changed=0") == 2

    # Another range: a reset still restores the one before the first.
    network(lan, "41000-41999")
    assert local_ports(lan) == [["41000", "41999"]] * 2
    kept = (tmp_path / "sysctl0/90-nanochat-ddp.conf").read_text()
    assert "before: 32768 60999" in kept and "net.ipv4.ip_local_port_range = 41000 41999" in kept

    done = lan.playbook("nanochat.ddp.reset", ddp_port_range="41000-41999")
    assert done.returncode == 0, done.stdout
    assert local_ports(lan) == before
    assert [lan.run(number, "nft", "list", "ruleset") for number in (0, 1)] == walls
    assert not list(tmp_path.glob("sysctl*/*"))
