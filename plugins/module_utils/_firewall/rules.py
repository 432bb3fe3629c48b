# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A firewall rule of a job, and pure functions from addresses and ports to the wanted rules."""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import Callable, Iterable, List, NamedTuple, Sequence, Tuple

from .._kit.files import read_bytes

Run = Callable[[List[str]], Tuple[int, str, str]]

MARK = "nanochat.ddp:"
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class FirewallError(Exception):
    """A firewall could not be read or changed; the text says which, what was tried and the tool's own words."""


class Forbidden(FirewallError):
    """The tool is there, but this user (or this container) may not use it."""


class Rule(NamedTuple):
    """One peer may open TCP connections to one range of our ports."""

    peer: str
    low: int
    high: int

    @property
    def family(self) -> int:
        return ipaddress.ip_address(self.peer).version

    def ports(self, separator: str = "-") -> str:
        return str(self.low) if self.low == self.high else f"{self.low}{separator}{self.high}"

    def text(self) -> str:
        return f"tcp from {self.peer} to port {self.ports()}"


class FirewallStep(NamedTuple):
    """A command to run, or a file to replace; the command then only shows the change to people."""

    argv: list[str]
    path: str = ""
    text: str = ""

    def shown(self) -> str:
        return "sudo " + " ".join(shlex.quote(word) for word in self.argv)


def check_name(name: str) -> str:
    """A job's name, which becomes a part of the mark of its rules."""
    if not NAME.match(name):
        raise FirewallError(
            f"name {name!r} cannot mark firewall rules: use at most 64 letters, digits, '.', '_' and '-'"
        )
    return name


def marked_names(text: str) -> set[str]:
    """Names of all jobs whose mark is in a text, such as a comment or a file."""
    found = re.findall(rf"{re.escape(MARK)}([A-Za-z0-9][A-Za-z0-9._,-]*)", text)
    return {name for names in found for name in names.split(",") if NAME.match(name)}


def address(text: str) -> str:
    """An address in its canonical form, without a zone (fe80::1%eth0), because rules have none."""
    plain = str(text).strip().partition("%")[0]
    try:
        return str(ipaddress.ip_address(plain))
    except ValueError:
        raise FirewallError(f"peer {text!r} is not an IPv4 or IPv6 address; rules need addresses") from None


def port_range(text: int | str) -> tuple[int, int]:
    """29500, "29500", "32768-60999" or "32768:60999" as (low, high)."""
    match = re.match(r"^\s*(\d{1,5})(?:\s*[-:]\s*(\d{1,5}))?\s*$", str(text))
    low, high = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        raise FirewallError(f"ports {text!r} is neither a port (1 to 65535) nor a range like 32768-60999")
    return low, high


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order; those that overlap or touch are joined, because some backends refuse overlaps."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def wanted_rules(peers: Sequence[str], ports: Sequence[int | str]) -> list[Rule]:
    """One rule for every peer and every range of ports, without duplicates, in the order of the peers."""
    ranges = merged(port_range(port) for port in ports)
    unique = list(dict.fromkeys(address(peer) for peer in peers))
    return [Rule(peer, low, high) for peer in unique for low, high in ranges]


def with_block(text: str, mark: str, lines: Sequence[str]) -> str:
    """A configuration file with these lines in the job's marked block at its end; without lines, without a block."""
    exact = re.escape(mark)
    # Byte for byte as it was before the block was added.
    rest = re.sub(rf"(?:\n# BEGIN {exact} joined|# BEGIN {exact})\n.*?# END {exact}\n", "", text, flags=re.S)
    if not lines:
        return rest
    block = "\n".join([*lines, f"# END {mark}"]) + "\n"
    # `joined` notes that the last line had no line feed, so that removal restores every byte.
    return f"{rest}\n# BEGIN {mark} joined\n{block}" if rest and rest[-1] != "\n" else f"{rest}# BEGIN {mark}\n{block}"


def file_text(path: str) -> str:
    """The text of a file, byte for byte; empty where it is missing or may not be read."""
    return read_bytes(path).decode("utf-8", "surrogateescape")
