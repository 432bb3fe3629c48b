# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ufw: rules of its own kind, prepended to the owner's denials; ufw keeps them across reboots."""

from __future__ import annotations

import re
from typing import Dict, Sequence, Set, Tuple

from .backend import FirewallBackend, Placed
from .rules import MARK, Rule, file_text, marked_names, port_range


def words_of(rule: Rule) -> tuple[str, ...]:
    """The words of a rule, in the order in which ufw shows them."""
    return ("allow", "from", rule.peer, "to", "any", "port", rule.ports(":"), "proto", "tcp")


def parse_added(text: str) -> dict[tuple[str, ...], set[str]]:
    """Every rule of `ufw show added` by its words, with the jobs that want it; none for the owner's own rules."""
    rules: dict[tuple[str, ...], set[str]] = {}
    for line in text.splitlines():
        if line.startswith("ufw "):
            plain, _dummy, comment = line[4:].partition(" comment ")
            mark = comment.strip().strip("'\"")
            rules[tuple(plain.split())] = marked_names(mark) if mark.startswith(MARK) else set()
    return rules


class Ufw(FirewallBackend):
    """One ufw rule for every peer and range. ufw holds a rule only once, so jobs share it and its comment names them all."""

    name = "ufw"
    writes = ("iptables",)
    added: Dict[Tuple[str, ...], Set[str]] = {}  # noqa: RUF012

    def read(self) -> None:
        there = self.has_program("ufw")
        self.status = self.tool("ufw", "status", "verbose") if there else ""
        self.added = parse_added(self.tool("ufw", "show", "added")) if there else {}

    def in_force(self) -> bool:
        lets_in = re.search(r"^Default: allow \(incoming\)", self.status, re.M)
        denials = any({"deny", "reject", "limit"} & set(words) for words in self.added)
        return "Status: active" in self.status and (not lets_in or denials)

    def marked(self) -> list[Tuple[str, Placed]]:
        return [
            (job, Placed((), Rule(words[2], *port_range(words[6]))))
            for words, jobs in self.added.items()
            for job in jobs
        ]

    def targets(self, wanted: Sequence[Rule]) -> list[Placed]:
        # The owner's own rule with the same words serves too, and must not be removed later.
        return [Placed((), rule) for rule in wanted if self.added.get(words_of(rule)) != set()]

    def insertion(self, target: Placed) -> list[str]:
        words = words_of(target.rule)
        if others := self._others(words):
            return ["ufw", *words, "comment", f"{MARK}{','.join(sorted({*others, self.job}))}"]
        return ["ufw", "prepend", *words, "comment", self.mark]

    def removal(self, placed: Placed) -> list[str]:
        words = words_of(placed.rule)
        if others := self._others(words):
            return ["ufw", *words, "comment", f"{MARK}{','.join(sorted(others))}"]
        return ["ufw", "delete", *words]

    def _others(self, words: tuple[str, ...]) -> set[str]:
        """The other jobs that want a rule."""
        return self.added.get(words, set()) - {self.job}

    def suspected(self) -> bool:
        return bool(re.search(r"^ENABLED=yes", file_text("/etc/ufw/ufw.conf"), re.M))
