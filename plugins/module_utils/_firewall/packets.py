# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether one of the owner's rules matches the peers' packets: new TCP connections to our ports.

Every question has three answers: True (all of these packets), False (none of them), None (some, or unknown).
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import Rule, Run

Answer = Optional[bool]
# Tables and chains of programs that restore their own rules, so ours would not last there.
FOREIGN = re.compile(
    r"^(f2b-|fail2ban|docker|kube-|libvirt|lxc|incus|lxd|cni-|podman|netavark|cali-|calico|cilium|flannel|crowdsec|ts-|tailscale)",
    re.I,
)
OTHER_PROTOCOLS = frozenset(
    ["udp", "udplite", "icmp", "icmpv6", "igmp", "sctp", "dccp", "esp", "ah", "comp", "arp", "vlan", "ether"]
)
NOT_FOR_US = ("127.0.0.0/8", "::1/128", "224.0.0.0/4", "ff00::/8", "255.255.255.255/32")


class Packets(NamedTuple):
    """The packets of one peer to one range of our ports; empty fields are unknown."""

    rule: Rule
    nic: str = ""  # where they arrive
    own: Tuple[str, ...] = ()  # the addresses of this host


def packets_of(wanted: Sequence[Rule], run: Run) -> list[Packets]:
    """The packets to admit."""
    own = tuple(re.findall(r"\binet6? ([\da-fA-F.:]+)/", run(["ip", "-o", "address", "show"])[1])) if wanted else ()
    nics = {peer: nic_towards(peer, run) for peer in dict.fromkeys(rule.peer for rule in wanted)}
    return [Packets(rule, nics[rule.peer], own) for rule in wanted]


def nic_towards(peer: str, run: Run) -> str:
    """The interface on which a peer's packets arrive, guessed from the return route; empty if unknown."""
    found = re.search(r"\bdev (\S+)", run(["ip", "route", "get", peer])[1])
    return found.group(1) if found else ""


def foreign(name: str) -> bool:
    """Whether another program maintains a table or chain."""
    return bool(FOREIGN.match(name))


def both(answers: Sequence[Answer]) -> Answer:
    """All of several conditions."""
    return False if False in answers else None if None in answers else True


def negated(answer: Answer) -> Answer:
    return None if answer is None else not answer


# Parts that the tools have in common


def ports_in(packets: Packets, low: int, high: int) -> Answer:
    rule = packets.rule
    if high < rule.low or rule.high < low:
        return False
    return True if low <= rule.low and rule.high <= high else None


def source_in(packets: Packets, network: str) -> Answer:
    return address_in(packets.rule.peer, network)


def target_in(packets: Packets, network: str) -> Answer:
    """Whether they are sent to an address of this network."""
    if any(address_in(network.split("/")[0], other) for other in NOT_FOR_US):
        return False
    answers = [address_in(address, network) for address in packets.own]
    return None if not answers or None in answers or len(set(answers)) > 1 else answers[0]


def address_in(address: str, network: str) -> Answer:
    """Whether an address is in a network; None if the network is something else, such as a MAC address or a set."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return None


def arrives_on(packets: Packets, pattern: str, wild: str = "*") -> Answer:
    """Whether they arrive on an interface with this name, or with this beginning of a name."""
    if not packets.nic:
        return False if pattern == "lo" else None
    if pattern.endswith(wild):
        return packets.nic.startswith(pattern[:-1])
    return packets.nic == pattern


def any_of(answers: Sequence[Answer]) -> Answer:
    return True if True in answers else None if None in answers else False


# nftables, as its JSON tells


def nft_match(packets: Packets, match: Mapping[str, Any], sets: Mapping[str, Any]) -> Answer:
    """One `match` of a rule."""
    answer = nft_holds(packets, match.get("left"), match.get("right"), sets)
    return negated(answer) if match.get("op") == "!=" else answer


def nft_holds(packets: Packets, left: Any, right: Any, sets: Mapping[str, Any]) -> Answer:
    """Whether the left side's value for these packets equals the right side, or is in it."""
    if not isinstance(left, dict):
        return None
    if isinstance(right, str) and right.startswith("@"):
        found = sets.get(right[1:])
        return None if found is None else nft_holds(packets, left, {"set": found}, sets)
    if isinstance(right, dict) and "set" in right:
        right = right["set"]
    if isinstance(right, list):
        return any_of([nft_holds(packets, left, item, sets) for item in right])
    if isinstance(right, dict) and "elem" in right:
        return nft_holds(packets, left, right["elem"].get("val"), sets)
    return _nft_value(packets, left, right)


def _nft_value(packets: Packets, left: Mapping[str, Any], right: Any) -> Answer:
    if "payload" in left:
        return _nft_payload(packets, left["payload"], right)
    if "meta" in left:
        return _nft_meta(packets, str(left["meta"].get("key")), right)
    if "ct" in left:
        # Every connection begins with a packet of the state `new`.
        return str(right) == "new" if left["ct"].get("key") == "state" else None
    if "fib" in left:
        # Assume that peers' packets arrive on the interface that routes back to them, addressed to this host.
        return str(right) == "local" if left["fib"].get("result") == "type" else right is True
    if "&" in left:
        return _nft_flags(left["&"], right)
    return None


def _nft_payload(packets: Packets, payload: Mapping[str, Any], right: Any) -> Answer:
    protocol, field = payload.get("protocol"), payload.get("field")
    if protocol in OTHER_PROTOCOLS:
        return False
    if protocol in ("ip", "ip6"):
        if (protocol == "ip") != (packets.rule.family == 4):
            return False
        if field in ("protocol", "nexthdr"):
            return str(right) in ("tcp", "6")
        if field in ("saddr", "daddr"):
            return _nft_addresses(packets, str(field), right)
    if field == "dport":
        low, high = right["range"] if isinstance(right, dict) and "range" in right else (right, right)
        return ports_in(packets, int(low), int(high)) if str(low).isdigit() and str(high).isdigit() else None
    if field == "flags":
        return "syn" in _words(right)
    return None


def _nft_addresses(packets: Packets, field: str, right: Any) -> Answer:
    within = source_in if field == "saddr" else target_in
    if isinstance(right, dict) and "prefix" in right:
        return within(packets, f"{right['prefix']['addr']}/{right['prefix']['len']}")
    if isinstance(right, dict) and "range" in right and field == "saddr":
        try:
            low, high = (ipaddress.ip_address(str(one)) for one in right["range"])
        except ValueError:
            return None
        return int(low) <= int(ipaddress.ip_address(packets.rule.peer)) <= int(high)
    return within(packets, str(right)) if isinstance(right, str) else None


def _nft_meta(packets: Packets, key: str, right: Any) -> Answer:
    if key in ("iifname", "iif"):
        return arrives_on(packets, str(right))
    if key == "l4proto":
        return str(right) in ("tcp", "6")
    if key == "nfproto":
        return str(right) == f"ipv{packets.rule.family}"
    if key == "pkttype":
        return str(right) in ("host", "unicast")
    return None


def _nft_flags(sides: Any, right: Any) -> Answer:
    """`tcp flags & mask == value`: the first packet carries SYN and nothing else."""
    payload = sides[0].get("payload", {}) if isinstance(sides, list) and sides and isinstance(sides[0], dict) else {}
    if payload.get("field") != "flags" or len(sides) != 2:
        return None
    return {"syn"} & _words(sides[1]) == _words(right) - {"0"}


def _words(value: Any) -> set[str]:
    """All names in an expression such as {"|": ["fin", "syn"]}."""
    if isinstance(value, dict):
        return set().union(*(_words(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(_words(item) for item in value))
    return {str(value)}


# iptables, as `iptables -S` prints it


def iptables_rule(packets: Packets, words: Sequence[str]) -> Answer:
    """Whether these packets meet the conditions of a rule, given as its words after the chain's name."""
    answers: list[Answer] = []
    for place, (flag, value) in enumerate(zip(words, words[1:])):
        answer = _iptables_condition(packets, flag, value, words[place + 2 : place + 3])
        if answer != "":
            inverted = place > 0 and words[place - 1] == "!"
            answers.append(negated(answer) if inverted else answer)
    return both(answers)


def _iptables_condition(packets: Packets, flag: str, value: str, after: Sequence[str]) -> Any:
    """The answer to one condition; "" if the word is none."""
    if flag == "-s":
        return source_in(packets, value)
    if flag == "-d":
        return target_in(packets, value)
    if flag == "-i":
        return arrives_on(packets, value, "+")
    if flag in ("-p", "--protocol"):
        return value in ("tcp", "all", "6")
    if flag in ("--dport", "--dports"):
        pairs = re.findall(r"(\d+)(?::(\d+))?", value)
        return any_of([ports_in(packets, int(low), int(high or low)) for low, high in pairs]) if pairs else None
    if flag in ("--ctstate", "--state"):
        return "NEW" in value.split(",")
    if flag == "--tcp-flags" and after:
        return ({"SYN"} & set(value.split(","))) == set(after[0].split(",")) - {"NONE"}
    if flag == "--dst-type":
        return "LOCAL" in value.split(",")
    if flag == "--match-set" and foreign(value):
        return False  # another program's bans are reported, not judged
    # Anything else, such as a limit, a mark or a set of addresses, may be met.
    return ""
