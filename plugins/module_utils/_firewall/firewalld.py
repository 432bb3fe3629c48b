# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""firewalld: rich rules in the zone of the peer's packets, both running and permanent.

Rich rules have no comment; a priority derived from the job's name identifies them and puts them before any denial.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.packets import address_in, nic_towards
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    MARK,
    Change,
    FirewallError,
    FirewallStep,
    Rule,
    concerns,
    covers,
    port_range,
)

RUNNING: tuple[str, ...] = ()
PERMANENT = ("--permanent",)


class Zone(NamedTuple):
    """One zone from `firewall-cmd --list-all-zones`."""

    target: str
    interfaces: list[str]
    sources: list[str]
    ports: list[tuple[int, int]]
    rich: list[str]


def priority(mark: str) -> int:
    """A job's constant priority, in the range before rules without one."""
    return -(1000 + zlib.crc32(mark.encode()) % 30000)


def rich_rule(rule: Rule, mark: str) -> str:
    """A rule in firewalld's syntax and order."""
    return (
        f'rule priority="{priority(mark)}" family="ipv{rule.family}" source address="{rule.peer}" '
        f'port port="{rule.ports()}" protocol="tcp" accept'
    )


def own_rule(text: str, mark: str) -> Rule | None:
    """The rule behind a rich rule of this job, or None for any other."""
    exact = re.match(
        rf'^rule priority="{priority(mark)}" family="ipv[46]" source address="([^"]+)" '
        r'port port="(\d+(?:-\d+)?)" protocol="tcp" accept$',
        text,
    )
    return Rule(exact.group(1), *port_range(exact.group(2))) if exact else None


def parse_zones(text: str) -> dict[str, Zone]:
    """All zones with the settings that concern us."""
    zones: dict[str, Zone] = {}
    for block in re.split(r"\n(?=\S)", text.strip("\n")):
        lines = block.splitlines()
        if not lines or not lines[0].strip():
            continue
        value = {key.strip(): rest.strip() for key, dummy, rest in (line.partition(":") for line in lines[1:])}
        ports = [port_range(port.split("/")[0]) for port in value.get("ports", "").split() if port.endswith("/tcp")]
        rich = [line.strip() for line in lines if re.match(r"^\s+rule ", line)]
        interfaces, sources = value.get("interfaces", "").split(), value.get("sources", "").split()
        zones[lines[0].split()[0]] = Zone(value.get("target", "default"), interfaces, sources, ports, rich)
    return zones


def zone_for(peer: str, nic: str, zones: dict[str, Zone], default: str) -> str:
    """A source's zone takes precedence over the interface's, which takes precedence over the default."""
    for name, zone in zones.items():
        if any(address_in(peer, source) for source in zone.sources):
            return name
    return next((name for name, zone in zones.items() if nic and nic in zone.interfaces), default)


def is_open(zone: Zone, rule: Rule) -> bool:
    """Whether a zone already admits the peer."""
    denials = [
        rich
        for rich in zone.rich
        if (rich.endswith(("reject", "drop")) or " reject " in rich) and concerns(plain(rich), [rule])
    ]
    return zone.target == "ACCEPT" or (covers(zone.ports, rule) and not denials)


def plain(rich: str) -> str:
    """A rich rule in the syntax of the other firewalls."""
    said = re.sub(r'\bsource address="([^"]+)"', r"from \1", rich)
    return re.sub(r'\bport port="([^"]+)"', r"port \1", said)


def text_of(name: str, rule: Rule) -> str:
    """Our rule in a zone as a line for people."""
    return f"zone {name}: {rule.text()}"


class Firewalld(FirewallBackend):
    """Manages the running and the permanent rule set with firewall-cmd."""

    name = "firewalld"
    order = 20
    writes = ("iptables",)

    def in_force(self, wanted: Sequence[Rule]) -> bool:
        return self._runs()

    def _runs(self) -> bool:
        return self.run(["firewall-cmd", "--state"])[0] == 0

    def names(self, known: Sequence[str]) -> set[str]:
        """Rich rules have no comment, so only names known from elsewhere can be found."""
        found = []
        for argv in self._listings():
            found += [rich for zone in parse_zones(self.tool(*argv)).values() for rich in zone.rich]
        return {name for name in known if any(own_rule(rich, MARK + name) for rich in found)}

    def _listings(self) -> list[list[str]]:
        """The commands that list the zones; of a stopped firewalld, the permanent ones."""
        if self._runs():
            return [["firewall-cmd", "--list-all-zones"], ["firewall-cmd", "--permanent", "--list-all-zones"]]
        # Without root, or in a container without D-Bus, this shows nothing either.
        there = self.run(["firewall-offline-cmd", "--version"])[0] == 0
        return [["firewall-offline-cmd", "--list-all-zones"]] if there else []

    def _change_stopped(self) -> Change:
        """The rules of a stopped firewalld: those it would restore at its start can be removed."""
        own = [pair for argv in self._listings() for pair in self._own(parse_zones(self.tool(*argv)))]
        steps = [
            FirewallStep(["firewall-offline-cmd", f"--zone={name}", f"--remove-rich-rule={rich_rule(rule, self.mark)}"])
            for name, rule in own
        ]
        return Change(steps, [text_of(*pair) for pair in own], [])

    def change(self, wanted: Sequence[Rule]) -> Change:
        if not self._runs():
            return self._change_stopped()
        zones, placed = self._placed(wanted)
        for name, rule in placed:
            if name not in zones:
                raise FirewallError(f"firewalld: zone {name!r}, which receives {rule.peer}, does not exist")
        needed = [(name, rule) for name, rule in placed if not is_open(zones[name], rule)]
        permanent = parse_zones(self.tool("firewall-cmd", "--permanent", "--list-all-zones"))
        steps = self._steps(RUNNING, zones, needed) + self._steps(PERMANENT, permanent, needed)
        return Change(steps, [text_of(*pair) for pair in self._own(zones)], [text_of(*pair) for pair in needed])

    def _placed(self, wanted: Sequence[Rule]) -> tuple[dict[str, Zone], list[tuple[str, Rule]]]:
        """All zones, and the name of each rule's zone with the rule."""
        zones = parse_zones(self.tool("firewall-cmd", "--list-all-zones"))
        default = self.tool("firewall-cmd", "--get-default-zone").strip()
        return zones, [(zone_for(rule.peer, nic_towards(rule.peer, self.run), zones, default), rule) for rule in wanted]

    def blocking_rules(self, wanted: Sequence[Rule]) -> list[str]:
        zones, placed = self._placed(wanted)
        names = dict.fromkeys(name for name, dummy in placed)
        return [f"zone {name} (target {zones[name].target})" for name in names if name in zones]

    def _own(self, zones: dict[str, Zone]) -> list[tuple[str, Rule]]:
        found = [(name, own_rule(rich, self.mark)) for name, zone in zones.items() for rich in zone.rich]
        return [(name, rule) for name, rule in found if rule is not None]

    def _steps(
        self, scope: tuple[str, ...], zones: dict[str, Zone], needed: list[tuple[str, Rule]]
    ) -> list[FirewallStep]:
        present = self._own(zones)
        add = [("add", pair) for pair in needed if pair not in present]
        remove = [("remove", pair) for pair in present if pair not in needed]
        return [
            FirewallStep(["firewall-cmd", *scope, f"--zone={name}", f"--{verb}-rich-rule={rich_rule(rule, self.mark)}"])
            for verb, (name, rule) in add + remove
        ]

    def suspected(self) -> bool:
        return self.service("is-active", "firewalld")

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[FirewallStep]:
        verb = "add" if present else "remove"
        return [
            FirewallStep(["firewall-cmd", *scope, f"--{verb}-rich-rule={rich_rule(rule, self.mark)}"])
            for scope in (RUNNING, PERMANENT)
            for rule in wanted
        ]
