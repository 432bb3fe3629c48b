# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The types of a plan (plan.json). document.py reads untrusted plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, TypedDict

if TYPE_CHECKING:
    from typing import NotRequired  # which the Python 3.9 that hosts may have does not know

    from .decode import Master, Ports
    from .findings import Finding
    from .probe import Folder


class Model(TypedDict):
    """The model and figures derived from its shape."""

    depth: int
    aspect_ratio: int
    head_dim: int
    sequence: int
    window_pattern: str
    vocab_size: int
    n_embd: int
    n_head: int
    parameters: Dict[str, int]
    flops_per_token: int


class Training(TypedDict):
    """Training parameters."""

    profile: str
    total_batch: int
    device_batch: int
    batch_split: str
    rows: List[int]  # per rank and step
    iterations: int
    tokens: int
    tokens_per_parameter: float
    flops: int
    sync: str
    head: str  # shared: each host has a part of the vocabulary; or whole
    head_open: bool  # whether another ddp_sync may have another head
    asked: Dict[str, str]  # the settings sync and head as the user wrote them
    matmul: str
    matmul_tried: List[str]
    eval_every: int
    eval_tokens: int
    sample_every: int
    save_every: int
    save_minutes: int  # maximum minutes between checkpoints; 0: no time limit
    keep_checkpoints: int
    resume: bool
    tracker: str
    tracker_port: int
    head_shares: NotRequired[List[int]]  # weights of unequal parts of the head, by rank
    timed: NotRequired[str]  # ddp_budget or ddp_finish_by, if the run ends at a time: the iterations are an estimate


class DataContents(TypedDict):
    """The contents of a data set; its id is a digest of them."""

    source: str  # text, url, host or controller
    paths: List[str]  # on the host, or on the controller
    url: Optional[str]
    shards: int
    vocab_size: int
    names: Optional[List[str]]  # files of a url; the last shard is validation


class Data(DataContents):
    """The data set and its source host."""

    id: str
    host: str  # the host that has it, or else makes or fetches it
    prose: NotRequired[bool]  # the default text: of Python files only the longer texts in them


class Trainer(TypedDict):
    """The trainer and its packages."""

    script: str  # the module to start
    torch: str
    index: str  # auto: of CPU builds first; default: only that of the host, with builds for CUDA
    python: str
    packages: List[str]  # the locks that the environment is made from
    offline: bool


class Keeper(TypedDict):
    """Parameters of the keepers."""

    restarts: int  # deaths within an hour after which the run gives up
    min_hosts: int  # minimum hosts to continue without the others
    grace_seconds: int  # seconds to wait for lost hosts
    survive_reboot: bool


class Guest(TypedDict):
    """When a host leaves the run because its machine is in use (ddp_polite guest)."""

    hours: Optional[str]
    away_if: Optional[str]  # a shell command


class Node(TypedDict):
    """One host's share of the run, including its keeper."""

    host: str  # inventory name
    rank: int
    address: Optional[str]
    nic: Optional[str]  # lo if all nodes are on one machine
    data_ports: Ports  # this host's, the only ones opened on it
    user: Optional[str]
    base_dir: str
    run_dir: str
    data_dir: str  # the store; run_dir/data holds exactly the plan's shards
    trainer_dir: str  # this collection's trainer: the working folder of argv
    venv_dir: str
    python: Optional[str]  # creates the venv; None if none was found
    python_version: Optional[str]
    session: str
    threads: int
    cores: Optional[List[int]]  # processors that the rank is pinned to (NANOCHAT_CORES)
    rows: int  # of this rank per step
    head_share: int  # weight of this rank's part of a shared head
    accumulation: int  # passes of at most device_batch rows
    memory_bytes: int  # estimate
    disk_bytes: int  # estimate
    checkpoint_bytes: int  # estimate
    peers: List[str]  # addresses of the nodes on other machines
    flags: Dict[str, object]  # of the trainer: numbers, texts, true for a switch, a list by rank
    argv: List[str]  # complete; argv[0] is the venv's Python; built from the rest by _contract/command_line.py
    env: Dict[str, str]  # complete except for secrets
    env_secret: List[str]  # names in ddp_secret_env; their values go only into the env file
    # What its owner is asked to open without root: those of all profiles, so that one request is enough.
    owner_ports: NotRequired[List[int]]
    open_ports: NotRequired[List[int]]  # to open on this host besides data_ports
    keeper_port: NotRequired[int]
    session_argv: NotRequired[List[str]]  # what the session runs instead of argv: the keeper
    guest: NotRequired[Guest]  # with ddp_polite guest


class Conversations(TypedDict):
    """A file of conversations for fine-tuning."""

    path: str  # on the controller
    sha256: Optional[str]
    count: int


class Here(TypedDict, total=False):
    """Files and folders of the settings on the controller."""

    folders: Dict[str, Folder]
    conversations: Conversations
    held_out: Conversations
    obstacles: List[Finding]  # why these or the folder of results cannot be used


class Stage(TypedDict):
    """The stage of a run that fine-tunes another run's model."""

    stage: str
    base: str  # the run whose model it uses
    conversations: NotRequired[Conversations]  # conversations.jsonl in the run folder
    held_out: NotRequired[Conversations]  # conversations-val.jsonl in the run folder


class Plan(TypedDict):
    """The document that all later steps read; the digest covers the rest."""

    format: int  # 1
    run: str  # name of the run
    world: int  # number of ranks
    master: Master
    data_ports: Ports  # where Gloo and the shard servers of all hosts listen
    manage_firewall: bool
    timeout_seconds: int  # all timeouts derive from it
    model: Model
    training: Training
    data: Data
    trainer: Trainer
    nodes: List[Node]  # by rank
    stage: NotRequired[Stage]  # only if it continues the model of another run
    keeper: NotRequired[Keeper]  # only with ddp_restarts
    digest: NotRequired[str]  # 16 hexadecimal digits


def open_ports(plan: Plan, node: Node) -> List[int]:
    """The ports that a host opens besides its data ports: the rendezvous port on the master only, unless there are keepers."""
    return node.get("open_ports") or ([plan["master"]["port"]] if node["rank"] == 0 else [])


class Given(TypedDict):
    """A host from the inventory and its probe."""

    name: str
    settings: Mapping[str, object]
    probe: NotRequired[Optional[Mapping[str, object]]]
    error: NotRequired[Optional[str]]  # why there is no probe
    reach: NotRequired[Optional[str]]  # how other hosts would address it
    login: NotRequired[Optional[str]]  # how this controller's user logs in there
