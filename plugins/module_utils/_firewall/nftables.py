# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables without a front end: our rules at the head of every base chain that can drop incoming packets.

In nftables an accept in one base chain does not prevent a drop in the next, so a table of our own would
open nothing. The rules are identified by their comment.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Sequence, Tuple

from .backend import FOREIGN, NOT_SAVED, FirewallBackend, Placed, Saved
from .rules import MARK, FirewallStep, Rule, file_text, marked_names, port_range, with_block

FILE = "/etc/nftables.conf"  # loaded at boot by the service nftables
OWN = re.compile(rf'^ip6? saddr (\S+) tcp dport (\S+) accept comment "{re.escape(MARK)}([^"]+)" # handle (\d+)$', re.M)
Chain = Tuple[str, ...]  # family, table, name


def parsed(text: str) -> dict[Chain, str]:
    """The text of each chain in the output of `nft -a list ruleset`, or in a file of that syntax."""
    found: dict[Chain, str] = {}
    place: Chain = ()
    table = ["", ""]
    # Of texts in quotation marks only our own marks matter, of what follows a # only the handles that nft adds.
    text = re.sub(r'"[^"\n]*"', lambda quoted: quoted.group(0) if MARK in quoted.group(0) else '""', text)
    for part in re.split(r"[{};\n]", re.sub(r"#(?! handle).*", "", text)):
        kind, name, more = [*part.split(), "", "", ""][:3]
        if kind == "table":
            table = ["ip", name] if more in ("", "#") else [name, more]
        elif kind in ("chain", "set", "map") and name:
            place = (*table, name) if kind == "chain" else ()
            found.update({place: ""} if place else {})
        elif place and kind not in ("", "#"):
            found[place] += part.strip() + "\n"
    return found


def base_chains(chains: dict[Chain, str]) -> list[Chain]:
    """The chains at which packets that come in begin."""
    hook = re.compile(r"\s*type filter hook (input|prerouting)\b")
    return [chain for chain, text in chains.items() if hook.match(text) and chain[0] in ("ip", "ip6", "inet")]


def can_drop(text: str) -> bool:
    """Whether a packet may be dropped in a chain, or where it leads. That is not looked up: a rule that does not help does no harm."""
    return bool(re.search(r"\b(drop|reject|queue|jump|goto|vmap)\b", re.sub(r'"[^"]*"', "", text)))


def managed(chain: Chain, by_iptables: bool) -> bool:
    """Whether firewalld, or an iptables that sees it, manages a chain, so that only its own tools change it."""
    family, table, name = chain
    own = family in ("ip", "ip6") and table in ("filter", "raw", "mangle", "security") and name.isupper()
    return table == "firewalld" or (own and by_iptables)


class Nftables(FirewallBackend):
    """Manages one rule per peer, range and chain that can drop."""

    name = "nftables"
    packet_filter = "nft"

    def read(self) -> None:
        self.listed = self.tool("nft", "-a", "list", "ruleset") if self.has_program("nft") else ""
        self.all = parsed(self.listed)
        # Tables in iptables' format that it cannot handle, or without iptables installed, count as native.
        seen = all(self._is_seen_by(tool) for tool in ("iptables", "ip6tables"))
        chains = [one for one in base_chains(self.all) if can_drop(self.all[one]) and not managed(one, seen)]
        self.others = [chain for chain in chains if FOREIGN.match(chain[1])]
        self.chains = [chain for chain in chains if chain not in self.others]

    def _is_seen_by(self, tool: str) -> bool:
        """Whether this iptables stores its rules in nftables, where it would see these."""
        return self.run([tool, "-w", "-S"])[0] == 0 and "legacy" not in self.run([tool, "--version"])[1]

    def in_force(self) -> bool:
        return bool(self.chains)

    def marked(self) -> list[Tuple[str, Placed]]:
        return list(self._handles())

    def _handles(self) -> dict[Tuple[str, Placed], str]:
        """The handle of each rule, by which nft takes it away."""
        return {
            (job, Placed(chain, Rule(peer, *port_range(ports)))): handle
            for chain, text in self.all.items()
            for peer, ports, job, handle in OWN.findall(text)
        }

    def targets(self, wanted: Sequence[Rule]) -> list[Placed]:
        return targets_in(self.chains, wanted)

    def insertion(self, target: Placed) -> list[str]:
        rule = target.rule
        source = ["ip" if rule.family == 4 else "ip6", "saddr", rule.peer]
        match = [*source, "tcp", "dport", rule.ports()]
        return ["nft", "insert", "rule", *target.place, *match, "accept", "comment", f'"{self.mark}"']

    def removal(self, placed: Placed) -> list[str]:
        return ["nft", "delete", "rule", *placed.place, "handle", self._handles()[self.job, placed]]

    def text(self, target: Placed) -> str:
        return f"{' '.join(target.place)}: {target.rule.text()}"

    def saved(self, targets: Sequence[Placed]) -> Saved:
        """Our block in the file loaded at boot, or why there is none."""
        lines = [" ".join(self.insertion(target)[1:]) for target in reversed(targets)]
        text = file_text(FILE)
        loaded = os.access(FILE, os.R_OK) and self.service("is-enabled", "nftables")
        new = with_block(text, self.mark, lines if loaded else [])
        why = self._refused(new) if loaded and lines and new != text else ""
        if why:
            why = f"{FILE} does not define the chains that can drop now ({why}), so these rules are lost at a reboot"
            return [], f"nftables: {why}"
        # The command shows people what is added to the file, or how what was added is taken out again.
        added = f"cat >> {FILE} <<'END'\n{with_block('', self.mark, lines)}END"
        shown = added if lines else f"sed -i '/^# BEGIN {self.mark}/,/^# END {self.mark}/d' {FILE}"
        steps = [FirewallStep(["sh", "-c", shown], FILE, new)] if new != text else []
        return steps, f"nftables: {NOT_SAVED}" if lines and not loaded else ""

    def _refused(self, text: str) -> str:
        """nft's errors about a draft, before it replaces the file loaded at boot."""
        with tempfile.NamedTemporaryFile("w", suffix=".nft", encoding="utf-8", errors="surrogateescape") as draft:
            draft.write(text)
            draft.flush()
            code, out, err = self.run(["nft", "-c", "-f", draft.name])
        return "" if code == 0 else (err or out).strip().split("\n")[0].replace(draft.name + ":", "line ")

    def names(self, known: Sequence[str]) -> set[str]:
        return marked_names(f"{self.listed}\n{file_text(FILE)}")

    def foreign(self) -> list[str]:
        return [f"nft chain {' '.join(chain)}" for chain in self.others]

    def suspected(self) -> bool:
        # If systemd cannot be asked, a file that drops is proof enough.
        drops = bool(re.search(r"\b(drop|reject)\b", file_text(FILE)))
        return drops and (self.service("is-active", "nftables") or not os.path.isdir("/run/systemd/system"))

    def guessed(self, wanted: Sequence[Rule]) -> list[Placed]:
        return targets_in(base_chains(parsed(file_text(FILE))) or [("inet", "filter", "input")], list(reversed(wanted)))

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[list[str]]:
        # Only root sees the handles of rules.
        rules = f'/^table/{{t=$2" "$3}} $1=="chain"{{c=$2}} /"{self.mark}"/{{print "delete rule",t,c,"handle",$NF}}'
        by_owner = ["sh", "-c", f"nft -a list ruleset | awk '{rules}' | nft -f -"]
        return super().suggested(wanted, True) if present else [by_owner]


def targets_in(chains: Sequence[Chain], wanted: Sequence[Rule]) -> list[Placed]:
    """Every rule in every chain that takes its family."""
    return [Placed(chain, rule) for chain in chains for rule in wanted if chain[0] in ("inet", FAMILY[rule.family])]


FAMILY = {4: "ip", 6: "ip6"}
