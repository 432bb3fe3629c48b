# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the processors to compute on: one of every fast core.

A matrix product is split evenly, so all threads wait for the slowest: small cores and second threads of a core cost more than
they gain.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Sequence

from .network import read

# Cores below this fraction of the fastest one's capacity are small.
SMALL = 0.8


class Cpu(NamedTuple):
    """One processor."""

    number: int
    core: tuple[str, str]  # socket and core
    small: bool


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
    return [Cpu(one, core_of(os.path.join(base, f"cpu{one}"), one), one in small) for one in sorted(usable)]


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


def fast_cores(processors: Sequence[Cpu]) -> list[int]:
    """The first processor of every fast core; of every core where all are alike."""
    first: dict[tuple[str, str], int] = {}
    for one in [one for one in processors if not one.small] or processors:
        first.setdefault(one.core, one.number)
    return sorted(first.values())
