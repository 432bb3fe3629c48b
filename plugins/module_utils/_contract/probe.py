# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of a host's facts, as the verb host_info returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Optional, TypedDict

from .lineage import TrainingIdentity

if TYPE_CHECKING:
    from .decode import (
        AbsolutePath,
        Duration,
        Interface,
        Lineage,
        LocalPort,
        NicName,
        PlainWord,
        Positive,
        Processor,
        Rights,
        Version,
    )


class Memory(TypedDict):
    """In bytes, within the limit of the control groups."""

    total: int
    available: int


class TrainingProcess(TypedDict):
    """A process that this collection started, or that looks like a trainer."""

    pid: int
    parent: int
    user: str
    command: str
    session: Optional[str]
    run: Optional[str]


class PortHolder(TypedDict):
    """A process that listens on a port; None if only root may see it."""

    port: int
    pid: Optional[int]
    user: str
    command: Optional[str]
    session: Optional[str]
    run: Optional[str]


class DataSet(TypedDict):
    """A data set in the store."""

    id: str
    bytes: int  # of its shards


class Machine(TypedDict):
    """The host itself."""

    hostname: str
    boot_id: str
    network_namespace: str
    arch: PlainWord
    user: str
    home: AbsolutePath


class Processors(TypedDict):
    """CPU facts."""

    model: str
    flags: List[str]
    available: int
    available_physical: int
    allowed: List[Processor]
    fast: List[Processor]  # one of every fast core
    load1: Optional[float]
    native_bf16: bool
    compiler: bool


class Python(TypedDict):
    """An interpreter that could create the trainer's environment."""

    executable: AbsolutePath
    version: Version


class VenvFacts(TypedDict):
    """The trainer's environment; `kind` as in _probe/host.py."""

    exists: bool
    kind: str
    torch: Optional[str]
    disk: Disk


class PythonFacts(TypedDict):
    """The interpreter that runs the probe, others, and the trainer's environment."""

    version: Version
    candidates: List[Python]
    library: AbsolutePath
    venv: VenvFacts


class Disk(TypedDict):
    """The disk below a path; `parent` is the nearest existing folder."""

    parent: str
    real_path: str
    device: Optional[int]
    free: int
    writable: bool
    noexec: bool
    exposed: str  # who else could change what is run from there; empty for nobody
    fstype: str
    source: str
    network: bool


class Nic(TypedDict):
    """A network interface."""

    name: NicName
    kind: str
    up: bool
    speed_mbit: Optional[int]
    enslaved: bool
    ipv4: List[Interface]
    ipv6: List[Interface]


class Folder(TypedDict):
    """A path from the settings."""

    path: str
    kind: str
    readable: bool
    shards: int
    tokenizer: bool
    text_bytes: Optional[int]  # size of its visible files; null with very many folders


class PastSession(TypedDict):
    """How the session of a run ended, if it has."""

    id: Optional[str]
    ended: Optional[float]
    exit_code: Optional[int]
    stopped: Optional[bool]


class PastShare(TypedDict):
    """A host's share of that start."""

    rows: int
    head_share: int
    cores: Optional[List[Processor]]
    polite: Optional[str]


class PastRun(TypedDict):
    """An earlier start of the run: parts of its plan, its session and its checkpoints."""

    path: str
    plan_digest: Optional[str]
    shares: Dict[str, PastShare]  # by host
    sync: Optional[str]
    matmul: Optional[str]
    total_batch: int
    iterations: int
    lineage: Lineage
    session: Optional[PastSession]
    training: Optional[TrainingIdentity]
    checkpoints: List[int]


class Measured(TypedDict, total=False):
    """A rehearsal's measurements on this host, as far as the plan reads them."""

    pass_seconds: Positive
    adamw_seconds: Duration
    muon_seconds: Duration
    muon_half_seconds: Duration  # for the updates of half of the matrices
    tokens_per_second: Duration
    products: Dict[str, Measured]  # by precision, if several were tried
    link: Dict[str, Duration]  # the slowest, in Mbit/s and milliseconds
    matmul: str
    model: Dict[str, object]
    device_batch: int


class Route(TypedDict):
    """How packets to a peer leave a host."""

    peer: str
    nic: Optional[str]
    source: Optional[str]


class Names(TypedDict):
    """Addresses that names resolve to on a host."""

    own: List[str]
    peers: Dict[str, List[str]]


class LocalPorts(TypedDict):
    """The range of a host's local ports."""

    low: LocalPort
    high: LocalPort


class Probe(TypedDict):
    """All facts of a host."""

    host: Machine  # name, boot, architecture and user of the host
    python: PythonFacts  # this Python, those of 3.10 and newer, where the library's sources lie, and the trainer's environment
    cpu: Processors  # model, features, the cores that this user may use, load, and whether bfloat16 is native
    memory: Memory  # bytes of memory, within the limit of the control group if there is one
    disk: Disk  # room below the base folder, whether it can be written, and the file system it is on
    nics: List[Nic]  # kind is wired, wifi, virtual, overlay, bridge or loopback
    routes: List[Route]  # for each peer, and for `default`, the interface and own address that packets to it would take
    names: Names  # what the own name and the peers' names resolve to on this host
    sudo: Rights  # root's rights without a password: root, passwordless or none
    tmux: Dict[str, Optional[str]]  # path of tmux, or `null`
    trainer: bool  # whether the base folder has this collection's test programs
    ports: List[PortHolder]  # holders of the given ports; session and run are those of this collection
    processes: List[TrainingProcess]  # training processes of any owner
    limits: Dict[str, Optional[int]]  # of files, processes, memory, file size and computing; null for none
    logout: Dict[str, bool]  # whether systemd ends what the user leaves running at logout, and whether the user lingers
    ephemeral: LocalPorts  # the range of local ports, on which Gloo listens
    base_dir: AbsolutePath  # the base folder with `~` expanded
    run: Optional[PastRun]  # what is in the run's folder
    base_run: Optional[PastRun]  # the run whose model this one uses
    data: List[DataSet]  # data sets in the store
    folders: Dict[str, Folder]  # for each of the folders asked for, its kind (folder, file or absent) and what it holds
    measured: Optional[Measured]  # what was measured on this host before, or `null`
    # graphical: users who are logged in graphically; blind: logind where it is missing
    usage: Dict[str, List[PlainWord]]
