# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the facts of a host look like, as the module host_info returns them."""

from __future__ import annotations

from typing import Dict, List, Optional, TypedDict


class CoreSet(TypedDict):
    """Processors of a host that could compute together."""

    name: str
    cpus: List[int]


class Memory(TypedDict):
    """In bytes; the limit is that of the control groups."""

    total: int
    available: int
    swap_total: int
    swap_free: int
    limit: Optional[int]


class TrainingProcess(TypedDict):
    """A process that this collection started, or that looks like a trainer's."""

    pid: int
    parent: int
    user: str
    command: str
    session: Optional[str]
    age: Optional[int]


class PortHolder(TypedDict):
    """Who listens on a port; the process is None where only root may see it."""

    port: int
    addresses: List[str]
    pid: Optional[int]
    user: str
    command: Optional[str]
    session: Optional[str]
    ours: bool


class DataSet(TypedDict):
    """A data set in the store."""

    id: str
    shards: int
    bytes: int


class Machine(TypedDict):
    """The host itself."""

    hostname: str
    machine_id: str
    boot_id: str
    network_namespace: str
    kernel: str
    arch: str
    os: str
    user: str
    uid: int
    home: str
    time: float


class Processors(TypedDict):
    """What computes."""

    model: str
    flags: List[str]
    logical: int
    physical: int
    available: int
    available_physical: int
    allowed: List[int]
    sets: List[CoreSet]
    load1: Optional[float]
    native_bf16: bool


class Python(TypedDict):
    """An interpreter that could make the trainer's environment."""

    executable: str
    version: str
    venv_module: bool


class Pythons(TypedDict):
    """The interpreter that runs the probe, and others."""

    executable: str
    version: str
    candidates: List[Python]
    library: str


class Route(TypedDict):
    """How packets to a peer leave a host."""

    peer: str
    address: str
    nic: Optional[str]
    source: Optional[str]
    gateway: Optional[str]


class Names(TypedDict):
    """Addresses to which names lead on a host."""

    own: List[str]
    peers: Dict[str, List[str]]
