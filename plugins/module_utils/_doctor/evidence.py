# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of the evidence about a rank: collected on its host (gather.py), judged on the controller (judge.py)."""

from __future__ import annotations

from typing import Dict, List, Optional, TypedDict

from .._run.state import RunState


class RankProcess(TypedDict):
    """The rank's process; shares are of one core."""

    pid: int
    state: str
    command: Optional[str]
    cpu_share: float
    waits_for_core: Optional[float]
    memory_bytes: int
    swapped_bytes: Optional[int]
    waits_in: Optional[str]


class OtherProcess(TypedDict):
    """Another process that uses the CPU."""

    pid: int
    user: str
    command: str
    cpu_share: float


class Socket(TypedDict):
    """A TCP connection to a peer: bytes unsent and unread, and retransmissions."""

    peer: str
    port: int
    state: str
    unsent_bytes: int
    unread_bytes: int
    retransmits: int


class NicState(TypedDict):
    """The state of a network interface."""

    state: str
    carrier_changes: Optional[int]
    errors: Optional[int]


class System(TypedDict):
    """The machine during the examination."""

    cpus: int
    load1: float
    memory_total: Optional[int]
    memory_available: int
    swapped_pages_per_second: Optional[float]
    disk_free: Optional[int]
    throttled: Optional[bool]
    limited: Optional[float]
    pressure: Optional[Dict[str, Optional[float]]]
    oom_kills: Optional[int]
    nics: Optional[Dict[str, NicState]]
    time: Optional[float]


class Flight(TypedDict, total=False):
    """Gloo's flight record."""

    last_seq: object
    entries: object


class Dump(TypedDict, total=False):
    """The trainer's answer: the stacks of its threads and its flight record."""

    time: object
    pid: object
    stacks: Dict[str, List[str]]
    flight: Flight


class _Seen(TypedDict, total=False):
    rank: int
    process: Optional[RankProcess]
    dump: Optional[Dump]
    sockets: List[Socket]
    links: Dict[str, str]
    system: System
    others: List[OtherProcess]
    kernel: List[str]
    oom_kills_before: Optional[int]


class RankEvidence(_Seen):
    """All evidence; unreadable parts are missing."""

    run: RunState
