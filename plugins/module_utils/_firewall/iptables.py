# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""iptables and ip6tables without a front end: rules at the head of INPUT, known by their comment."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import Backend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    Change,
    Rule,
    Step,
    concerns,
    file_text,
)

HARMLESS = {"ACCEPT", "RETURN", "LOG", "NFLOG", "MARK", "CONNMARK", "CT", "TRACE", ""}


class Family(NamedTuple):
    """The two tools of the two address families, and the files that a distribution loads at boot, if it does."""

    version: int
    tool: str
    bits: int
    files: tuple[tuple[str, str], ...]


FAMILIES = (
    Family(
        4, "iptables", 32, (("etc/iptables/rules.v4", "netfilter-persistent"), ("etc/sysconfig/iptables", "iptables"))
    ),
    Family(
        6,
        "ip6tables",
        128,
        (("etc/iptables/rules.v6", "netfilter-persistent"), ("etc/sysconfig/ip6tables", "ip6tables")),
    ),
)


def words_of(rule: Rule, bits: int, mark: str) -> list[str]:
    """A rule as `iptables -S` prints it, after the name of the chain."""
    match = ["-p", rule.proto, "-m", rule.proto, "--dport", rule.ports(":"), "-m", "comment", "--comment", mark]
    return ["-s", f"{rule.peer}/{bits}", *match, "-j", "ACCEPT"]


def _target(words: Sequence[str]) -> str:
    """Where a rule sends a packet; nothing for a rule that only counts."""
    return next((after for flag, after in zip(words, words[1:]) if flag in ("-j", "-g")), "")


def blocks(listing: str) -> bool:
    """Whether a packet for INPUT could meet anything but acceptance (`iptables -S`)."""
    rules: dict[str, list[str]] = {}
    policy = "ACCEPT"
    for line in listing.splitlines():
        words = split(line)
        if words[:2] == ["-P", "INPUT"]:
            policy = words[2]
        elif words[:1] == ["-A"]:
            rules.setdefault(words[1], []).append(_target(words))
        elif words[:1] == ["-N"]:
            rules.setdefault(words[1], [])
    return policy != "ACCEPT" or _drops("INPUT", rules, set())


def _drops(chain: str, rules: dict[str, list[str]], seen: set[str]) -> bool:
    seen.add(chain)
    for target in rules.get(chain, []):
        if target in rules:
            if target not in seen and _drops(target, rules, seen):
                return True
        elif target not in HARMLESS:
            return True
    return False


def ends_packets(line: str, listing: str) -> bool:
    """Whether a rule of INPUT or of a chain of the owner's ends a packet itself."""
    words = split(line)
    if words[:1] != ["-A"] or words[1] in ("FORWARD", "OUTPUT"):
        return False
    target = _target(words)
    return target not in HARMLESS and f"-N {target}" not in listing.splitlines()


def split(line: str) -> list[str]:
    """The words of a line of `iptables -S` or iptables-save."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def own_rules(listing: str, mark: str) -> list[list[str]]:
    """The words after `-A INPUT` of every rule that carries our mark."""
    lines = (split(line) for line in listing.splitlines() if line.startswith("-A INPUT ") and mark in line)
    return [words[2:] for words in lines if ("--comment", mark) in zip(words, words[1:])]


def rule_of(words: Sequence[str]) -> Rule:
    """One of our own rules back from its words."""
    value = dict(zip(words, words[1:]))
    low, _dummy, high = value["--dport"].partition(":")
    return Rule(value["-s"].split("/")[0], int(low), int(high or low), value["-p"])


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


class Iptables(Backend):
    """Both families, each only where it blocks."""

    name = "iptables"

    def _listing(self, family: Family) -> str:
        argv = [family.tool, "-w", "-S"]
        code, _dummy, err = self.run(argv)
        # Tables that native nft made are the nftables backend's.
        return "" if code == 127 or (code and "incompatible" in err) else self.tool(*argv)

    def in_force(self) -> bool:
        return any(blocks(self._listing(family)) for family in FAMILIES)

    def change(self, wanted: Sequence[Rule]) -> Change:
        total = Change([], [], [], True)
        for family in FAMILIES:
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
        if not blocks(listing):
            wanted = []
        mine = own_rules(listing, self.mark)
        present = [rule_of(words) for words in mine]
        # Each goes in at the head, so the last of them is put in first.
        steps = [
            Step([family.tool, "-w", "-I", "INPUT", "1", *words_of(rule, family.bits, self.mark)])
            for rule in reversed(wanted)
            if rule not in present
        ]
        steps += [
            Step([family.tool, "-w", "-D", "INPUT", *words]) for words, rule in zip(mine, present) if rule not in wanted
        ]
        saved, persistent = self._saved(family, wanted)
        note = (
            ""
            if persistent
            else f"{family.tool}: no service loads saved rules at boot, so these are gone after a reboot"
        )
        return Change(
            steps + saved, [rule.text() for rule in present], [rule.text() for rule in wanted], persistent, note
        )

    def _saved(self, family: Family, wanted: Sequence[Rule]) -> tuple[list[Step], bool]:
        """Our lines in the file that is loaded at boot; the running rule set is not saved over the owner's file."""
        for name, unit in family.files:
            text = file_text(self.at(name))
            if text is None or not self.service("is-enabled", unit):
                continue
            new = saved_with(text, self.mark, [words_of(rule, family.bits, self.mark) for rule in wanted])
            kept = len(own_rules(new, self.mark)) == len(wanted)
            shown = ["netfilter-persistent", "save"] if "iptables/" in name else ["service", unit, "save"]
            return ([Step(shown, self.at(name), new)] if new != text else []), kept
        return [], not wanted

    def walls(self, wanted: Sequence[Rule]) -> list[str]:
        found: list[str] = []
        for family in FAMILIES:
            mine = [rule for rule in wanted if rule.family == family.version]
            listing = self._listing(family) if mine else ""
            lines = [line for line in listing.splitlines() if ends_packets(line, listing) and concerns(line, mine)]
            found += lines or re.findall(r"^-P INPUT (?!ACCEPT).*", listing, re.M)
        return found

    def suspected(self) -> bool:
        return any(self.service("is-active", unit) for unit in ("netfilter-persistent", "iptables"))

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[Step]:
        head = ["-I", "INPUT", "1"] if present else ["-D", "INPUT"]
        tools = {family.version: family for family in FAMILIES}
        steps = [
            Step([tools[rule.family].tool, *head, *words_of(rule, tools[rule.family].bits, self.mark)])
            for rule in wanted
        ]
        saver = self.run(["netfilter-persistent", "--help"])[0] != 127
        return steps + ([Step(["netfilter-persistent", "save"])] if saver else [])
