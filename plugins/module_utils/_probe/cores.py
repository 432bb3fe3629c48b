# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds sets of processors that are worth timing against each other on this host.

A matrix product is split evenly, so all threads wait for the slowest: small cores, second threads of a core and memory of
another socket can each cost more than they gain. The rehearsal measures which do.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import CoreSet
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.network import read

MOST_SETS = 4
# Cores below this fraction of the fastest one's capacity are small.
SMALL = 0.8


class Cpu(NamedTuple):
    """One processor."""

    number: int
    core: tuple[str, str]  # socket and core
    small: bool
    node: int


def listed(text: str) -> list[int]:
    """The numbers in a list such as 0-7,16."""
    found: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(low), int(high or low) + 1)
    return found


def cpus(allowed: set[int], root: str = "/sys") -> list[Cpu]:
    """The processors that this user may use, and that are online and not isolated."""
    base = os.path.join(root, "devices/system/cpu")
    online = read(os.path.join(base, "online"))
    usable = set(allowed) & set(listed(online)) if online else set(allowed)
    usable = (usable - set(listed(read(os.path.join(base, "isolated"))))) or usable
    small = small_ones(usable, root)
    nodes = nodes_of(root)
    return [
        Cpu(number, core_of(os.path.join(base, f"cpu{number}"), number), number in small, nodes.get(number, 0))
        for number in sorted(usable)
    ]


def core_of(folder: str, number: int) -> tuple[str, str]:
    core = read(os.path.join(folder, "topology/core_id"))
    package = read(os.path.join(folder, "topology/physical_package_id"))
    return (package, core) if core else ("", f"cpu{number}")


def small_ones(usable: set[int], root: str) -> set[int]:
    """Efficiency cores: by Intel's two core types, or by an ARM kernel's capacities."""
    atoms = set(listed(read(os.path.join(root, "devices/cpu_atom/cpus"))))
    if atoms:
        return atoms
    texts = {number: read(os.path.join(root, f"devices/system/cpu/cpu{number}/cpu_capacity")) for number in usable}
    capacity = {number: int(text) for number, text in texts.items() if text.isdigit()}
    most = max(capacity.values(), default=0)
    return {number for number, value in capacity.items() if value < SMALL * most}


def nodes_of(root: str) -> dict[int, int]:
    """The NUMA node of each processor."""
    base = os.path.join(root, "devices/system/node")
    found: dict[int, int] = {}
    for number in listed(read(os.path.join(base, "online"))):
        found.update(dict.fromkeys(listed(read(os.path.join(base, f"node{number}", "cpulist"))), number))
    return found


def one_each(processors: Sequence[Cpu]) -> list[int]:
    """The first processor of every core."""
    first: dict[tuple[str, str], int] = {}
    for one in processors:
        first.setdefault(one.core, one.number)
    return sorted(first.values())


def core_sets(processors: Sequence[Cpu], quota: float | None = None) -> list[CoreSet]:
    """Sets worth timing as {name, cpus}, the default first; none exceeds the CPU quota."""
    big = [one for one in processors if not one.small]
    counts = {node: len([one for one in big if one.node == node]) for node in {one.node for one in big}}
    largest = [one for one in big if one.node == max(counts, key=lambda node: (counts[node], -node))] if counts else []
    named = [
        ("fast cores" if len(big) < len(processors) else "all cores", one_each(big)),
        ("all cores", one_each(processors)),
        ("cores of one socket", one_each(largest)),
        ("all threads of the fast cores" if len(big) < len(processors) else "all threads", [one.number for one in big]),
    ]
    most = len(processors) if quota is None else max(1, int(quota + 0.5))
    found: list[CoreSet] = []
    for name, numbers in named:
        numbers = numbers[:most]
        if numbers and numbers not in [one["cpus"] for one in found]:
            found.append({"name": name, "cpus": numbers})
    return found[:MOST_SETS]
