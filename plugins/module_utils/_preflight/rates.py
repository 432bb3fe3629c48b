# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Link rates during a step, from each host's measurements. Pure functions."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional

from .._plan.step_model import WIRE_SHARE, Link

# Below this the link is the limit, and a short all-reduce would underestimate it; above it, Gloo's copying is.
FAST_LINE = 2000.0

# From a host to its peers.
Links = Mapping[str, Mapping[str, Link]]


def slowest_link(tries: Mapping[str, Mapping[str, Any]], gloo_mbit: Optional[float] = None) -> Optional[Link]:
    """The link that every step waits for; for a fast one Gloo's own measurement, if lower."""
    links = [link for tried in tries.values() for link in tried.get("links") or [] if link.get("bandwidth_mbit")]
    if not links:
        return None
    rate = min(rate_of(link, gloo_mbit) for link in links)
    if gloo_mbit and rate > FAST_LINE:
        rate = min(rate, gloo_mbit / WIRE_SHARE)
    return Link(round(rate, 1), max(link["latency_ms"] or 0.0 for link in links))


def rate_of(link: Mapping[str, Any], gloo_mbit: Optional[float] = None) -> float:
    """The rate while both ends send, as in a step: half of it on a shared Wi-Fi channel. Both ends also send in an
    all-reduce; a busy CPU lowers either measurement, so the better one counts."""
    one_way, both_ways = float(link["bandwidth_mbit"]), link.get("duplex_mbit")
    return min(one_way, max(both_ways, (gloo_mbit or 0.0) / WIRE_SHARE)) if both_ways else one_way


def by_peer(links: Iterable[Mapping[str, Any]]) -> Dict[str, Link]:
    """One host's measured links, each {host, bandwidth_mbit, duplex_mbit, latency_ms}."""
    known = [link for link in links if link.get("bandwidth_mbit")]
    return {str(link["host"]): Link(round(rate_of(link), 1), float(link.get("latency_ms") or 0.0)) for link in known}


def slowest_between(links: Links, hosts: Iterable[str]) -> Optional[Link]:
    """The slowest link among these hosts; None if none was measured."""
    there = set(hosts)
    found = [link for host in sorted(there) for peer, link in links.get(host, {}).items() if peer in there]
    if not found:
        return None
    return Link(min(link.mbit for link in found), max(link.latency_ms for link in found))
