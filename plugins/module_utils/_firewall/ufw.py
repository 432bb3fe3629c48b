# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ufw: rules of its own kind, prepended to the owner's denials; ufw keeps them across reboots."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    MARK,
    Change,
    FirewallStep,
    Rule,
    concerns,
    file_text,
)

Spec = Tuple[str, ...]


class Added(NamedTuple):
    """A rule of `ufw show added`; jobs is None if it is not ours."""

    spec: Spec
    jobs: set[str] | None


def spec_of(rule: Rule) -> Spec:
    """The words of a rule, in the order in which ufw shows them."""
    return ("allow", "from", rule.peer, "to", "any", "port", rule.ports(":"), "proto", "tcp")


def text_of(spec: Spec) -> str:
    """Our rule as a line for people."""
    return Rule(spec[2], *_ports(spec[6])).text()


def _ports(text: str) -> tuple[int, int]:
    low, _dummy, high = text.partition(":")
    return int(low), int(high or low)


def parse_added(text: str) -> dict[Spec, Added]:
    """Every rule of `ufw show added`, by its words without the comment."""
    rules: dict[Spec, Added] = {}
    for line in text.splitlines():
        if not line.startswith("ufw "):
            continue
        plain, _dummy, comment = line[4:].partition(" comment ")
        try:
            spec = tuple(shlex.split(plain))
        except ValueError:
            spec = tuple(plain.split())
        words = comment.strip().strip("'\"")
        jobs = set(words[len(MARK) :].split(",")) if words.startswith(MARK) else None
        rules[spec] = Added(spec, jobs)
    return rules


def comment_of(jobs: set[str]) -> str:
    """The comment of a rule, which all jobs share that want it, because ufw holds a rule only once."""
    return MARK + ",".join(sorted(jobs))


class Ufw(FirewallBackend):
    """One ufw rule for every peer and range."""

    name = "ufw"
    order = 10
    writes = ("iptables",)

    def in_force(self, wanted: Sequence[Rule]) -> bool:
        if self.run(["ufw", "version"])[0] == 127:
            return False
        status = self.tool("ufw", "status", "verbose")
        if "Status: active" not in status:
            return False
        default = re.search(r"^Default: (\w+) \(incoming\)", status, re.M)
        # With a default of allow, only the owner's denials can block.
        return not default or default.group(1) != "allow" or any(concerns(line, wanted) for line in self._denials())

    def _denials(self) -> list[str]:
        added = parse_added(self.tool("ufw", "show", "added"))
        return [" ".join(spec) for spec in added if {"deny", "reject", "limit"} & set(spec)]

    def names(self, known: Sequence[str]) -> set[str]:
        if self.run(["ufw", "version"])[0] == 127:
            return set()
        entries = parse_added(self.tool("ufw", "show", "added")).values()
        return set().union(*(entry.jobs or set() for entry in entries))

    def change(self, wanted: Sequence[Rule]) -> Change:
        if self.run(["ufw", "version"])[0] == 127:
            return Change([], [], [])
        added = parse_added(self.tool("ufw", "show", "added"))
        job = self.mark[len(MARK) :]
        mine = [entry.spec for entry in added.values() if entry.jobs and job in entry.jobs]
        # The owner's own rule with the same words serves too, and must not be removed later.
        specs = [spec for spec in map(spec_of, wanted) if spec not in added or added[spec].jobs is not None]
        steps = [self._join(added, spec, job) for spec in reversed(specs) if spec not in mine]
        steps += [self._leave(added[spec], job) for spec in mine if spec not in specs]
        return Change(steps, [text_of(spec) for spec in mine], [text_of(spec) for spec in specs])

    @staticmethod
    def _join(added: dict[Spec, Added], spec: Spec, job: str) -> FirewallStep:
        entry = added.get(spec)
        if entry is None:
            return FirewallStep(["ufw", "prepend", *spec, "comment", MARK + job])
        return FirewallStep(["ufw", *spec, "comment", comment_of((entry.jobs or set()) | {job})])

    @staticmethod
    def _leave(entry: Added, job: str) -> FirewallStep:
        others = (entry.jobs or set()) - {job}
        if others:
            return FirewallStep(["ufw", *entry.spec, "comment", comment_of(others)])
        return FirewallStep(["ufw", "delete", *entry.spec])

    def blocking_rules(self, wanted: Sequence[Rule]) -> list[str]:
        denials = self._denials()
        default = re.findall(r"^Default: (?:deny|reject) \(incoming\)", self.tool("ufw", "status", "verbose"), re.M)
        return [f"ufw {line}" for line in denials if concerns(line, wanted)] or default

    def suspected(self) -> bool:
        return bool(re.search(r"^ENABLED=yes", file_text(self.at("etc/ufw/ufw.conf")) or "", re.M))

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[FirewallStep]:
        if present:
            return [FirewallStep(["ufw", "prepend", *spec_of(rule), "comment", self.mark]) for rule in wanted]
        return [FirewallStep(["ufw", "delete", *spec_of(rule)]) for rule in wanted]
