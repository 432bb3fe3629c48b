# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""iptables and ip6tables without a front end: rules at the head of INPUT, identified by their comment."""

from __future__ import annotations

import re
import shlex
from typing import Sequence, Tuple

from .backend import FOREIGN, NOT_SAVED, FirewallBackend, Placed, Saved
from .rules import MARK, FirewallStep, Rule, file_text, marked_names, port_range

FAMILIES = {"iptables": 4, "ip6tables": 6}
# The files that this service loads at boot.
FILES = {"iptables": "/etc/iptables/rules.v4", "ip6tables": "/etc/iptables/rules.v6"}
SAVER = "netfilter-persistent"
HARMLESS = {"ACCEPT", "RETURN", "LOG", "NFLOG", "MARK", "CONNMARK", "CT", "TRACE", ""}
# A kernel without IPv6 or the filter table has no such rules; tables made by native nft belong to the nftables backend.
NO_TABLES = ("incompatible", "Address family not supported", "Table does not exist", "can't initialize")


def words_of(rule: Rule, mark: str) -> list[str]:
    """A rule in the syntax of `iptables -S`, after the chain's name."""
    match = ["-p", "tcp", "-m", "tcp", "--dport", rule.ports(":"), "-m", "comment", "--comment", mark]
    return ["-s", f"{rule.peer}/{32 if rule.family == 4 else 128}", *match, "-j", "ACCEPT"]


def words_in(line: str) -> list[str]:
    """The words of a line of `iptables -S` or iptables-save."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def comment_of(words: Sequence[str]) -> str:
    """The comment of a rule, which in ours is the job's mark."""
    return dict(zip(words, words[1:])).get("--comment", "")


def rule_of(words: Sequence[str]) -> Rule:
    """Parse one of our own rules."""
    value = dict(zip(words, words[1:]))
    return Rule(value["-s"].split("/")[0], *port_range(value["--dport"]))


def droppers(listing: str) -> list[str]:
    """The policy of INPUT and the targets of its rules that can drop a packet; a chain to which it leads counts as one that can."""
    policy = re.findall(r"^-P INPUT (?!ACCEPT)(\S+)", listing, re.M)
    rules = [words for words in map(words_in, listing.splitlines()) if words[:2] == ["-A", "INPUT"]]
    targets = [after for words in rules for flag, after in zip(words, words[1:]) if flag in ("-j", "-g")]
    return [*policy, *(target for target in dict.fromkeys(targets) if target not in HARMLESS)]


def saved_with(text: str, mark: str, rules: Sequence[Sequence[str]]) -> str:
    """An iptables-save file with exactly these of our rules, at the head of INPUT in the filter table."""
    lines = [line for line in text.splitlines(keepends=True) if comment_of(words_in(line)) != mark]
    table = ""
    for number, line in enumerate(lines):
        table = line.strip() if line.startswith("*") else table
        if table == "*filter" and (line.startswith("-A INPUT ") or line.strip() == "COMMIT"):
            lines[number:number] = [f"-A INPUT {' '.join(words)}\n" for words in rules]
            break
    return "".join(lines)


class Iptables(FirewallBackend):
    """Manages both families, each only if it can drop."""

    name = "iptables"
    packet_filter = "iptables"

    def read(self) -> None:
        self.listings = {tool: self._listing(tool) for tool in FAMILIES}

    def _listing(self, tool: str) -> str:
        argv = [tool, "-w", "-S"]
        code, _dummy, err = self.run(argv)
        return "" if code == 127 or (code and any(words in err for words in NO_TABLES)) else self.tool(*argv)

    def _can_drop(self, tool: str) -> bool:
        return any(not FOREIGN.match(one) for one in droppers(self.listings[tool]))

    def in_force(self) -> bool:
        return any(self._can_drop(tool) for tool in self.listings)

    def marked(self) -> list[Tuple[str, Placed]]:
        return [
            (comment_of(words)[len(MARK) :], Placed((tool,), rule_of(words)))
            for tool, text in self.listings.items()
            for words in map(words_in, text.splitlines())
            if words[:2] == ["-A", "INPUT"] and comment_of(words).startswith(MARK)
        ]

    def targets(self, wanted: Sequence[Rule]) -> list[Placed]:
        tools = [tool for tool in self.listings if self._can_drop(tool)]
        return [Placed((tool,), rule) for tool in tools for rule in wanted if rule.family == FAMILIES[tool]]

    def insertion(self, target: Placed) -> list[str]:
        return [*target.place, "-w", "-I", "INPUT", "1", *words_of(target.rule, self.mark)]

    def removal(self, placed: Placed) -> list[str]:
        return [*placed.place, "-w", "-D", "INPUT", *words_of(placed.rule, self.mark)]

    def saved(self, targets: Sequence[Placed]) -> Saved:
        """Our lines in the file loaded at boot; the running rule set does not overwrite the owner's file."""
        steps, note, is_loaded = [], "", self.service("is-enabled", SAVER)
        for tool in self.listings:
            rules = [words_of(target.rule, self.mark) for target in targets if target.place == (tool,)]
            text = file_text(FILES[tool]) if is_loaded else ""
            new = saved_with(text, self.mark, rules)
            steps += [FirewallStep([SAVER, "save"], FILES[tool], new)] if new != text else []
            kept = all(f"-A INPUT {' '.join(words)}\n" in new for words in rules)
            note = note if kept or note else f"{tool}: {NOT_SAVED}"
        return steps, note

    def names(self, known: Sequence[str]) -> set[str]:
        saved = [file_text(name) for name in FILES.values()]
        lines = [line for text in [*self.listings.values(), *saved] for line in text.splitlines()]
        return marked_names("\n".join(line for line in lines if "-A INPUT" in line))

    def foreign(self) -> list[str]:
        return [
            f"{tool} chain {chain}"
            for tool, text in self.listings.items()
            for chain in droppers(text)
            if FOREIGN.match(chain)
        ]

    def suspected(self) -> bool:
        return self.service("is-active", SAVER)

    def guessed(self, wanted: Sequence[Rule]) -> list[Placed]:
        return [Placed(("iptables" if rule.family == 4 else "ip6tables",), rule) for rule in wanted]

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[list[str]]:
        saver = self.run([SAVER, "--help"])[0] != 127
        return super().suggested(wanted, present) + ([[SAVER, "save"]] if saver else [])
