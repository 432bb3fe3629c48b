# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables without a front end: our rules at the head of every chain that filters incoming packets.

In nftables an accept in one base chain does not prevent a drop in the next, so a table of our own would
open nothing. The rules go into the chains that may drop, and are identified by their comment.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from typing import Any, Dict, NamedTuple, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.backend import FirewallBackend
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.packets import (
    Packets,
    foreign,
    nft_holds,
    nft_match,
    packets_of,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    Change,
    FirewallError,
    FirewallStep,
    Rule,
    concerns,
    file_text,
    marked_names,
    with_block,
)

FILES = ("etc/nftables.conf", "etc/sysconfig/nftables.conf")
VERDICTS = ("drop", "reject", "queue")
Chain = Tuple[str, str, str]
# An entry of nft's JSON, as in libnftables-json(5).
Listed = Dict[str, Any]


class OwnRule(NamedTuple):
    """One of our rules in the kernel."""

    chain: Chain
    rule: Rule
    handle: int


class Ruleset:
    """The parts of `nft -j list ruleset` that concern incoming packets."""

    def __init__(self, text: str, iptables: bool = True) -> None:
        self.iptables = iptables
        try:
            objects = json.loads(text)["nftables"] if text.strip() else []
        except (ValueError, KeyError, TypeError) as error:
            raise FirewallError(f"nftables: `nft -j list ruleset` did not return JSON ({error})") from error
        self.base: dict[Chain, Listed] = {}
        self.rules: dict[Chain, list[Listed]] = {}
        self.maps: dict[tuple[str, str, str], Any] = {}
        self.sets: dict[tuple[str, str], Listed] = {}
        for entry in objects:
            self._take(entry)

    def _take(self, entry: Listed) -> None:
        if "chain" in entry:
            chain = entry["chain"]
            key = (chain["family"], chain["table"], chain["name"])
            self.rules.setdefault(key, [])
            if chain.get("hook") in ("input", "prerouting") and chain.get("type") == "filter":
                self.base[key] = chain
        elif "rule" in entry:
            rule = entry["rule"]
            self.rules.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(rule)
        elif "map" in entry:
            found = entry["map"]
            self.maps[(found["family"], found["table"], found["name"])] = found.get("elem", [])
        elif "set" in entry:
            found = entry["set"]
            self.sets.setdefault((found["family"], found["table"]), {})[found["name"]] = found.get("elem", [])

    def blocking(self, packets: Sequence[Packets], of_others: bool = False) -> list[Chain]:
        """The base chains that may drop one of these packets, of the owner's rule set or of other programs."""
        inet = [key for key in self.base if key[0] in ("ip", "ip6", "inet") and foreign(key[1]) is of_others]
        chains = [key for key in inet if not (managed(key) if self.iptables else key[1] == "firewalld")]
        return [key for key in chains if any(self._may_drop(key, one) for one in packets)]

    def _may_drop(self, chain: Chain, packets: Packets) -> bool:
        if not takes(chain, packets.rule):
            return False
        return self.base[chain].get("policy") == "drop" or self._drops(chain, packets, set())

    def _drops(self, chain: Chain, packets: Packets, seen: set[Chain]) -> bool:
        seen.add(chain)
        return any(self._rule_drops(chain, rule.get("expr", []), packets, seen) for rule in self.rules.get(chain, []))

    def _rule_drops(self, chain: Chain, parts: Any, packets: Packets, seen: set[Chain]) -> bool:
        """Whether a rule drops these packets, unless one of its conditions excludes them."""
        sets = self.sets.get(chain[:2], {})
        for part in parts:
            if "match" in part and nft_match(packets, part["match"], sets) is False:
                return False
            verdicts = self._reachable(chain, part["vmap"], packets) if "vmap" in part else [part]
            if any(self._verdict(chain, verdict, packets, seen) for verdict in verdicts):
                return True
        return False

    def _reachable(self, chain: Chain, vmap: Listed, packets: Packets) -> list[Any]:
        """The verdicts of a map that these packets may reach."""
        data = vmap.get("data")
        pairs = data.get("set", []) if isinstance(data, dict) else self.maps.get((*chain[:2], str(data)[1:]), [])
        sets = self.sets.get(chain[:2], {})
        return [verdict for value, verdict in pairs if nft_holds(packets, vmap.get("key"), value, sets) is not False]

    def _verdict(self, chain: Chain, part: Any, packets: Packets, seen: set[Chain]) -> bool:
        if not isinstance(part, dict):
            return False
        if any(verdict in part for verdict in VERDICTS):
            return True
        for word in ("jump", "goto"):
            target = (chain[0], chain[1], (part.get(word) or {}).get("target", ""))
            if target in self.rules and target not in seen and self._drops(target, packets, seen):
                return True
        return False

    def own(self, mark: str) -> list[OwnRule]:
        """Our rules, in any chain."""
        marked = [(chain, rule) for chain, rules in self.rules.items() for rule in rules if rule.get("comment") == mark]
        return [OwnRule(chain, rule_of(rule), rule["handle"]) for chain, rule in marked]


def managed(chain: Chain) -> bool:
    """Chains of iptables-nft or firewalld, which only their own tools change."""
    family, table, name = chain
    by_iptables = family in ("ip", "ip6") and table in ("filter", "raw", "mangle", "security") and name.isupper()
    return by_iptables or table == "firewalld"


def rule_of(rule: Listed) -> Rule:
    """Parse one of our own rules from nft's JSON."""
    peer, ports = "0.0.0.0", [0, 0]
    for part in rule.get("expr", []):
        match = part.get("match") or {}
        field = (match.get("left") or {}).get("payload", {}).get("field")
        if field == "saddr":
            peer = str(match["right"])
        elif field == "dport":
            right = match["right"]
            ports = right["range"] if isinstance(right, dict) else [right, right]
    return Rule(peer, int(ports[0]), int(ports[1]))


def words_of(chain: Chain, rule: Rule, mark: str) -> list[str]:
    """nft arguments for one rule at the head of a chain."""
    source = ["ip" if rule.family == 4 else "ip6", "saddr", rule.peer]
    return ["insert", "rule", *chain, *source, "tcp", "dport", rule.ports(), "accept", "comment", f'"{mark}"']


def takes(chain: Chain, rule: Rule) -> bool:
    """A chain of one family takes only that family's rules."""
    return chain[0] == "inet" or (chain[0] == "ip6") == (rule.family == 6)


def text_of(chain: Chain, rule: Rule) -> str:
    """Our rule as a line for people."""
    return f"{' '.join(chain)}: {rule.text()}"


class Nftables(FirewallBackend):
    """Manages one rule per peer, range and blocking chain."""

    name = "nftables"
    order = 30
    packet_filter = "nft"

    def _ruleset(self) -> Ruleset:
        text = self.tool("nft", "-j", "list", "ruleset") if self.has_program("nft") else ""
        # Tables in iptables' format that it cannot handle, or without iptables installed, count as native.
        return Ruleset(text, all(self._sees(tool) for tool in ("iptables", "ip6tables")))

    def _sees(self, tool: str) -> bool:
        """Whether this iptables stores its rules in nftables, where it would see these."""
        return self.run([tool, "-w", "-S"])[0] == 0 and "legacy" not in self.run([tool, "--version"])[1]

    def in_force(self, wanted: Sequence[Rule]) -> bool:
        return bool(self._ruleset().blocking(packets_of(wanted, self.run)))

    def names(self, known: Sequence[str]) -> set[str]:
        comments = [rule.get("comment") for rules in self._ruleset().rules.values() for rule in rules]
        saved = [
            line
            for name in FILES
            for line in (file_text(self.at(name)) or "").splitlines()
            if line.startswith("# BEGIN ")
        ]
        return marked_names("\n".join([*(str(comment) for comment in comments if comment), *saved]))

    def change(self, wanted: Sequence[Rule]) -> Change:
        ruleset = self._ruleset()
        own = ruleset.own(self.mark)
        chains = ruleset.blocking(packets_of(wanted, self.run))
        targets = [(chain, rule) for chain in chains for rule in wanted if takes(chain, rule)]
        present = [(entry.chain, entry.rule) for entry in own]
        steps = [
            FirewallStep(["nft", *words_of(chain, rule, self.mark)])
            for chain, rule in reversed(targets)
            if (chain, rule) not in present
        ]
        steps += [
            FirewallStep(["nft", "delete", "rule", *entry.chain, "handle", str(entry.handle)])
            for entry in own
            if (entry.chain, entry.rule) not in targets
        ]
        saved, note = self._saved([" ".join(words_of(chain, rule, self.mark)) for chain, rule in reversed(targets)])
        before, after = [text_of(*entry) for entry in present], [text_of(*entry) for entry in targets]
        return Change(steps + saved, before, after, not note, note)

    def _saved(self, lines: list[str]) -> tuple[list[FirewallStep], str]:
        """Our block in the file loaded at boot, or why there is none."""
        path = next((self.at(name) for name in FILES if file_text(self.at(name)) is not None), "")
        loaded = bool(path) and self.service("is-enabled", "nftables")
        text = file_text(path) if path else None
        if text is None or (not loaded and f"BEGIN {self.mark}" not in text):
            return (
                [],
                "nftables: no service restores saved rules at boot, so these are lost at a reboot" if lines else "",
            )
        new = with_block(text, self.mark, lines if loaded else [])
        if new == text:
            return [], ""
        why = self._refused(new) if lines and loaded else None
        if why is not None:
            return (
                [],
                f"nftables: {path} does not define the chains that block now ({why}), so these rules are lost at a reboot",
            )
        return [FirewallStep(["sh", "-c", f"cat >> {path} <<'END'\n{new[len(text) :]}END"], path, new)], ""

    def _refused(self, text: str) -> str | None:
        """nft's errors about a draft, before it replaces the file loaded at boot."""
        with tempfile.NamedTemporaryFile("w", suffix=".nft", encoding="utf-8", errors="surrogateescape") as draft:
            draft.write(text)
            draft.flush()
            code, out, err = self.run(["nft", "-c", "-f", draft.name])
        return None if code == 0 else (err or out).strip().split("\n")[0].replace(draft.name + ":", "line ")

    def blocking_rules(self, wanted: Sequence[Rule]) -> list[str]:
        chains = chain_lines(self.tool("nft", "list", "ruleset"))
        found = []
        for chain in self._ruleset().blocking(packets_of(wanted, self.run)):
            lines = [line for line in dropping_lines(chain, chains, set()) if concerns(line, wanted)]
            policy = re.findall(r"\bpolicy drop\b", " ".join(chains.get(chain, [])))
            found += [f"{' '.join(chain)}: {line}" for line in lines or policy]
        return found

    def foreign_rules(self, wanted: Sequence[Rule]) -> list[str]:
        chains = self._ruleset().blocking(packets_of(wanted, self.run), of_others=True)
        return [f"nft chain {' '.join(chain)}" for chain in chains]

    def suspected(self) -> bool:
        texts = [file_text(self.at(name)) or "" for name in FILES]
        # If systemd cannot be asked, a file that drops is proof enough.
        return any(re.search(r"\b(drop|reject)\b", text) for text in texts) and (
            self.service("is-active", "nftables") or not os.path.isdir("/run/systemd/system")
        )

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[FirewallStep]:
        if not present:
            return [FirewallStep(["sh", "-c", f"nft -a list ruleset | grep -F {self.mark}"])]
        text = next(filter(None, (file_text(self.at(name)) for name in FILES)), "")
        chains = input_chains(text) or [("inet", "filter", "input")]
        pairs = [(chain, rule) for chain in chains for rule in reversed(wanted) if takes(chain, rule)]
        return [FirewallStep(["nft", *words_of(chain, rule, self.mark)]) for chain, rule in pairs]


def chain_lines(text: str) -> dict[Chain, list[str]]:
    """The lines of each chain in `nft list ruleset`."""
    found: dict[Chain, list[str]] = {}
    table, lines = ("", ""), []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["table"] and len(words) > 2:
            table = ("ip", words[1]) if words[2] == "{" else (words[1], words[2])
        elif words[:1] == ["chain"] and len(words) > 1:
            lines = found.setdefault((*table, words[1]), [])
        elif line.endswith("{"):
            lines = []  # a set, a map and the like
        elif words and words != ["}"]:
            lines.append(line.strip())
    return found


def dropping_lines(chain: Chain, chains: dict[Chain, list[str]], seen: set[Chain]) -> list[str]:
    """The rules that drop a packet, in a chain and those it jumps to."""
    seen.add(chain)
    found = []
    for line in chains.get(chain, []):
        further = [(chain[0], chain[1], name) for name in re.findall(r"\b(?:jump|goto) ([^\s,}]+)", line)]
        if re.search(r"\b(drop|reject|queue)\b", line) and not line.startswith("type "):
            found.append(line)
        for target in further:
            found += dropping_lines(target, chains, seen) if target not in seen else []
    return found


def input_chains(text: str) -> list[Chain]:
    """The input chains defined in a configuration file, parsed without nft."""
    one_a_line = re.sub(r"#.*", "", text).replace("{", " {\n").replace("}", "\n}\n").replace(";", ";\n")
    hook = ["type", "filter", "hook", "input"]
    return [
        chain for chain, lines in chain_lines(one_a_line).items() if any(line.split()[:4] == hook for line in lines)
    ]
