# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""firewalld: rich rules in every zone in use, both running and permanent; which one a peer's packets enter is not worked out.

Rich rules have no comment; a priority derived from the job's name identifies them and puts them before any denial.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple, Sequence, Tuple

from .._contract.validate import LOWEST_PORT
from .backend import FOREIGN, FirewallBackend, Placed
from .rules import MARK, Rule, port_range

RUNNING: Tuple[str, ...] = ("firewall-cmd",)
PERMANENT: Tuple[str, ...] = ("firewall-cmd", "--permanent")
STOPPED: Tuple[str, ...] = ("firewall-offline-cmd",)
UNKNOWN = "priority-"
# Of a rule as rich_rule writes it.
OWN = re.compile(
    r'rule priority="-(\d{4,5})" family="ipv[46]" source address="([^"/]+)" port port="(\d+(?:-\d+)?)" protocol="tcp" accept'
)


class Zone(NamedTuple):
    """One zone from `firewall-cmd --list-all-zones`."""

    in_use: bool  # has interfaces or sources
    rich: list[str]


def priority_of(mark: str) -> str:
    """The priority of a job's rules, which is before that of rules without one; the mark of a job whose name is unknown says it."""
    told = re.fullmatch(re.escape(MARK) + UNKNOWN + r"(\d+)", mark)
    return "-" + (told.group(1) if told else str(1000 + zlib.crc32(mark.encode()) % 30000))


def rich_rule(rule: Rule, mark: str) -> str:
    """A rule in firewalld's syntax and order."""
    return (
        f'rule priority="{priority_of(mark)}" family="ipv{rule.family}" source address="{rule.peer}" '
        f'port port="{rule.ports()}" protocol="tcp" accept'
    )


def parse_zones(text: str) -> dict[str, Zone]:
    """All zones with the settings that concern us."""
    zones: dict[str, Zone] = {}
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        lines = block.splitlines()
        if lines and lines[0].strip():
            value = {key.strip(): rest.split() for key, dummy, rest in (line.partition(":") for line in lines[1:])}
            rich = [line.strip() for line in lines if re.match(r"^\s+rule ", line)]
            zones[lines[0].split()[0]] = Zone(bool(value.get("interfaces") or value.get("sources")), rich)
    return zones


class Firewalld(FirewallBackend):
    """Manages the running and the permanent rule set with firewall-cmd, and that of a stopped firewalld, which would restore it."""

    name = "firewalld"
    writes = ("iptables",)

    def read(self) -> None:
        self.runs = self.run(["firewall-cmd", "--state"])[0] == 0
        scopes = [RUNNING, PERMANENT] if self.runs else []
        # Without root, or in a container without D-Bus, this tool shows nothing either.
        if not self.runs and self.run([*STOPPED, "--version"])[0] == 0:
            scopes = [STOPPED]
        self.zones = {scope: parse_zones(self.tool(*scope, "--list-all-zones")) for scope in scopes}

    def in_force(self) -> bool:
        return self.runs

    def marked(self) -> list[Tuple[str, Placed]]:
        own = priority_of(self.mark)[1:]
        return [
            (
                self.job if found[1] == own else UNKNOWN + found[1],
                Placed((*scope, name), Rule(found[2], *port_range(found[3]))),
            )
            for scope, zones in self.zones.items()
            for name, zone in zones.items()
            for found in map(OWN.fullmatch, zone.rich)
            # The plan opens no port of root's services: of an unknown job, such a rule is the owner's.
            if found and (found[1] == own or port_range(found[3])[0] >= LOWEST_PORT)
        ]

    def targets(self, wanted: Sequence[Rule]) -> list[Placed]:
        if not self.runs or not wanted:
            return []
        default = self.tool("firewall-cmd", "--get-default-zone").strip()
        names = [name for name, zone in self.zones[RUNNING].items() if zone.in_use or name == default]
        places = [(*scope, name) for scope in self.zones for name in names if not FOREIGN.match(name)]
        return [Placed(place, rule) for place in places for rule in wanted]

    def insertion(self, target: Placed) -> list[str]:
        return self._command("add", target)

    def removal(self, placed: Placed) -> list[str]:
        return self._command("remove", placed)

    def _command(self, verb: str, placed: Placed) -> list[str]:
        *scope, zone = placed.place
        return [
            *scope,
            *([f"--zone={zone}"] if zone else []),
            f"--{verb}-rich-rule={rich_rule(placed.rule, self.mark)}",
        ]

    def guessed(self, wanted: Sequence[Rule]) -> list[Placed]:
        return [Placed((*scope, ""), rule) for scope in (RUNNING, PERMANENT) for rule in wanted]

    def text(self, target: Placed) -> str:
        return f"zone {target.place[-1]}: {target.rule.text()}"

    def names(self, known: Sequence[str]) -> set[str]:
        named = {UNKNOWN + priority_of(MARK + name)[1:]: name for name in known}
        return {named.get(job, job) for job in super().names(known)}

    def suspected(self) -> bool:
        return self.service("is-active", "firewalld")
