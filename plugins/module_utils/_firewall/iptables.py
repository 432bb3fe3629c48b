# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""iptables and ip6tables without a front end: rules at the head of INPUT, identified by their comment."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.packets import (
    Packets,
    foreign,
    iptables_rule,
    packets_of,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    Change,
    FirewallStep,
    Rule,
    file_text,
    marked_names,
)

HARMLESS = {"ACCEPT", "RETURN", "LOG", "NFLOG", "MARK", "CONNMARK", "CT", "TRACE", ""}


class Family(NamedTuple):
    """The two tools of an address family, and the files that a distribution loads at boot, if it does."""

    version: int
    tool: str
    bits: int
    files: tuple[tuple[str, str], ...]


FILES = {
    4: (("etc/iptables/rules.v4", "netfilter-persistent"), ("etc/sysconfig/iptables", "iptables")),
    6: (("etc/iptables/rules.v6", "netfilter-persistent"), ("etc/sysconfig/ip6tables", "ip6tables")),
}
FAMILIES = (Family(4, "iptables", 32, FILES[4]), Family(6, "ip6tables", 128, FILES[6]))
# Besides iptables-nft, the kernel still uses tables made by iptables-legacy; nothing loads these at boot.
LEGACY = (Family(4, "iptables-legacy", 32, ()), Family(6, "ip6tables-legacy", 128, ()))
# A kernel without IPv6 or the filter table has no such rules.
NO_TABLES = ("incompatible", "Address family not supported", "Table does not exist", "can't initialize")


def words_of(rule: Rule, bits: int, mark: str) -> list[str]:
    """A rule in the syntax of `iptables -S`, after the chain's name."""
    match = ["-p", "tcp", "-m", "tcp", "--dport", rule.ports(":"), "-m", "comment", "--comment", mark]
    return ["-s", f"{rule.peer}/{bits}", *match, "-j", "ACCEPT"]


def _target(words: Sequence[str]) -> str:
    """A rule's target; empty if it only counts."""
    return next((after for flag, after in zip(words, words[1:]) if flag in ("-j", "-g")), "")


def dropping_lines(listing: str, packets: Sequence[Packets], of_others: bool = False) -> list[str]:
    """The lines of `iptables -S` that may drop one of these packets on its way through INPUT.

    Skips chains of other programs, or with `of_others` counts only those.
    """
    lines: dict[str, list[str]] = {}
    for line in listing.splitlines():
        words = split(line)
        if words[:1] == ["-N"] or words[:1] == ["-A"]:
            lines.setdefault(words[1], []).extend([line] if words[0] == "-A" else [])
    found: list[str] = []
    for one in packets:
        found += [line for line in _dropping_in("INPUT", lines, one, set(), of_others) if line not in found]
    if packets and not of_others:
        found += re.findall(r"^-P INPUT (?!ACCEPT).*", listing, re.M)
    return found


def _dropping_in(
    chain: str, lines: dict[str, list[str]], packets: Packets, seen: set[str], of_others: bool
) -> list[str]:
    seen.add(chain)
    found: list[str] = []
    for line in lines.get(chain, []):
        words = split(line)[2:]
        target = _target(words)
        if iptables_rule(packets, words) is False:
            continue
        if target in lines:
            if target not in seen and (of_others or not foreign(target)):
                found += _dropping_in(target, lines, packets, seen, of_others)
        elif target not in HARMLESS and foreign(chain) is of_others:
            found.append(line)
    return found


def split(line: str) -> list[str]:
    """The words of a line of `iptables -S` or iptables-save."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def own_rules(listing: str, mark: str) -> list[list[str]]:
    """The words after `-A INPUT` of every rule with our mark."""
    lines = (split(line) for line in listing.splitlines() if line.startswith("-A INPUT ") and mark in line)
    return [words[2:] for words in lines if ("--comment", mark) in zip(words, words[1:])]


def rule_of(words: Sequence[str]) -> Rule:
    """Parse one of our own rules."""
    value = dict(zip(words, words[1:]))
    low, _dummy, high = value["--dport"].partition(":")
    return Rule(value["-s"].split("/")[0], int(low), int(high or low))


def saved_with(text: str, mark: str, rules: Sequence[Sequence[str]]) -> str:
    """An iptables-save file with exactly these of our rules, at the head of INPUT in the filter table."""
    lines = [
        line for line in text.splitlines(keepends=True) if ("--comment", mark) not in zip(split(line), split(line)[1:])
    ]
    new = [f"-A INPUT {' '.join(words)}\n" for words in rules]
    inside, place = False, None
    for number, line in enumerate(lines):
        inside = line.startswith("*filter") or (inside and not line.startswith("*"))
        if inside and place is None and (line.startswith("-A INPUT ") or line.strip() == "COMMIT"):
            place = number
    if place is None:
        return "".join(lines)
    return "".join(lines[:place] + new + lines[place:])


class Iptables(FirewallBackend):
    """Manages both families, each only if it blocks."""

    name = "iptables"
    order = 40
    packet_filter = "iptables"

    def _listing(self, family: Family) -> str:
        argv = [family.tool, "-w", "-S"]
        code, _dummy, err = self.run(argv)
        # Tables made by native nft belong to the nftables backend.
        return "" if code == 127 or (code and any(words in err for words in NO_TABLES)) else self.tool(*argv)

    def _families(self) -> list[Family]:
        """The two tools, and those of the legacy tables if there are any."""
        old = []
        if "legacy" not in self.run(["iptables", "--version"])[1]:
            old = [family for family in LEGACY if re.search(r"^-A|^-P INPUT (?!ACCEPT)", self._listing(family), re.M)]
        return [*FAMILIES, *old]

    def _dropping_lines(self, family: Family, wanted: Sequence[Rule], of_others: bool = False) -> list[str]:
        mine = [rule for rule in wanted if rule.family == family.version]
        return dropping_lines(self._listing(family), packets_of(mine, self.run), of_others) if mine else []

    def in_force(self, wanted: Sequence[Rule]) -> bool:
        return any(self._dropping_lines(family, wanted) for family in self._families())

    def names(self, known: Sequence[str]) -> set[str]:
        listings = [self._listing(family) for family in self._families()]
        saved = [file_text(self.at(name)) or "" for files in FILES.values() for name, dummy in files]
        return marked_names(
            "\n".join(line for text in [*listings, *saved] for line in text.splitlines() if "-A INPUT" in line)
        )

    def change(self, wanted: Sequence[Rule]) -> Change:
        total = Change([], [], [], True)
        for family in self._families():
            part = self._family_change(family, [rule for rule in wanted if rule.family == family.version])
            total = Change(
                total.steps + part.steps,
                total.before + part.before,
                total.after + part.after,
                total.persistent and part.persistent,
                total.note or part.note,
            )
        return total

    def _family_change(self, family: Family, wanted: Sequence[Rule]) -> Change:
        listing = self._listing(family)
        if not dropping_lines(listing, packets_of(wanted, self.run)):
            wanted = []
        mine = own_rules(listing, self.mark)
        present = [rule_of(words) for words in mine]
        # Each is inserted at the head, so the last comes first.
        steps = [
            FirewallStep([family.tool, "-w", "-I", "INPUT", "1", *words_of(rule, family.bits, self.mark)])
            for rule in reversed(wanted)
            if rule not in present
        ]
        steps += [
            FirewallStep([family.tool, "-w", "-D", "INPUT", *words])
            for words, rule in zip(mine, present)
            if rule not in wanted
        ]
        saved, persistent = self._saved(family, wanted)
        note = (
            ""
            if persistent
            else f"{family.tool}: no service restores saved rules at boot, so these are lost at a reboot"
        )
        return Change(
            steps + saved, [rule.text() for rule in present], [rule.text() for rule in wanted], persistent, note
        )

    def _saved(self, family: Family, wanted: Sequence[Rule]) -> tuple[list[FirewallStep], bool]:
        """Our lines in the file loaded at boot; the running rule set does not overwrite the owner's file."""
        for name, unit in family.files:
            text = file_text(self.at(name))
            if text is None or not self.service("is-enabled", unit):
                continue
            new = saved_with(text, self.mark, [words_of(rule, family.bits, self.mark) for rule in wanted])
            kept = len(own_rules(new, self.mark)) == len(wanted)
            shown = ["netfilter-persistent", "save"] if "iptables/" in name else ["service", unit, "save"]
            return ([FirewallStep(shown, self.at(name), new)] if new != text else []), kept
        return [], not wanted

    def blocking_rules(self, wanted: Sequence[Rule]) -> list[str]:
        found: list[str] = []
        for family in self._families():
            drops = self._dropping_lines(family, wanted)
            found += [line for line in drops if not line.startswith("-P")] or drops
        return found

    def foreign_rules(self, wanted: Sequence[Rule]) -> list[str]:
        return [
            f"iptables {line}"
            for family in self._families()
            for line in self._dropping_lines(family, wanted, of_others=True)
        ]

    def suspected(self) -> bool:
        return any(self.service("is-active", unit) for unit in ("netfilter-persistent", "iptables"))

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[FirewallStep]:
        head = ["-I", "INPUT", "1"] if present else ["-D", "INPUT"]
        tools = {family.version: family for family in FAMILIES}
        steps = [
            FirewallStep([tools[rule.family].tool, *head, *words_of(rule, tools[rule.family].bits, self.mark)])
            for rule in wanted
        ]
        saver = self.run(["netfilter-persistent", "--help"])[0] != 127
        return steps + ([FirewallStep(["netfilter-persistent", "save"])] if saver else [])
