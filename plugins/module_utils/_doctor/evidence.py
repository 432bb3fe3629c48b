# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of the evidence about a rank: collected on its host (gather.py), judged on the controller (judge.py)."""

from __future__ import annotations

from typing import Dict, List, Optional, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import RunState


class _MoreOfProcess(TypedDict, total=False):
    command: str
    waits_for_core: float
    swapped_bytes: int
    waits_in: str


class RankProcess(_MoreOfProcess):
    """The rank's process; shares are of one core."""

    pid: int
    state: str
    cpu_share: float
    memory_bytes: int


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


class _Counts(TypedDict, total=False):
    carrier_changes: int
    errors: int


class NicState(_Counts):
    """The state of a network interface."""

    state: str


class _MoreOfSystem(TypedDict, total=False):
    memory_total: int
    swapped_pages_per_second: float
    disk_free: Optional[int]
    throttled: bool
    limited: float
    pressure: Dict[str, Optional[float]]
    oom_kills: int
    nics: Dict[str, NicState]
    time: float


class System(_MoreOfSystem):
    """The machine during the examination."""

    cpus: int
    load1: float
    memory_available: int


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
