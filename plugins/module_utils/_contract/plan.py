# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shape of a plan (plan.json); docs/contract.md is made from it. Out of a file that may hold anything it is read by document.py."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import CoreSet


class Master(TypedDict):
    """Where the ranks meet."""

    host: str
    address: Optional[str]
    port: int


class Ports(TypedDict):
    """The range in which Gloo listens."""

    low: int
    high: int


class Model(TypedDict):
    """The model, and what follows from its shape."""

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


class _Parts(TypedDict, total=False):
    head_shares: List[int]  # weights of unequal parts of the head, by rank
    timed: str  # ddp_budget or ddp_finish_by, where the run ends at a time; the iterations are an estimate then


class Training(_Parts):
    """How it is trained."""

    profile: str
    total_batch: int
    device_batch: int
    batch_split: str
    rows: List[int]  # of each rank in a step
    iterations: int
    tokens: int
    tokens_per_parameter: float
    flops: int
    sync: str  # upstream: the trainer is neither ours nor joined and has no such choice
    head: str  # shared: each host has a part of its vocabulary; or whole
    head_open: bool  # whether another way of ddp_sync may have another head
    asked: Dict[str, str]  # the settings sync, head and local_steps as the user wrote them
    local_steps: int  # steps that each rank makes apart before all take the mean of their changes
    rebalance: bool  # shares follow the speeds while it trains
    matmul: str
    matmul_tried: List[str]
    eval_every: int
    eval_tokens: int
    sample_every: int
    save_every: int
    save_minutes: int  # a checkpoint at least that often; 0 for none by time
    keep_checkpoints: int
    resume: bool
    tracker: str
    tracker_port: int
    tracker_bind: str


class DataContents(TypedDict):
    """The contents of a data set; its id is a digest of them."""

    source: str  # text, url, host or controller
    paths: List[str]  # on the host, or on the controller
    url: Optional[str]
    shards: int
    vocab_size: int
    names: Optional[List[str]]  # files of a url; the last shard is validation


class Data(DataContents):
    """The data set, and the host that it comes from."""

    id: str
    host: str  # one that has it, else the one that makes or fetches it


class _Joined(TypedDict, total=False):
    joined: bool  # only where a checkout's ranks are joined (trainer/scripts/join.py)


class Trainer(_Joined):
    """The trainer and its packages."""

    source: str  # ours, path or git
    script: str  # the module that is started
    url: Optional[str]  # the path or URL of another trainer
    torch: str
    index: str  # auto, default or a URL
    python: str
    uv: str  # what makes a Python where none is new enough
    python_mirror: str
    requirements: List[str]
    tracker_requirements: List[str]
    offline: bool


class Keeper(TypedDict):
    """How keepers decide."""

    restarts: int  # deaths within an hour after which the run is given up
    min_hosts: int  # how many go on without the others
    grace_seconds: int  # how long lost hosts are waited for
    survive_reboot: bool


class Guest(TypedDict):
    """When a host leaves the run to whoever uses its machine (ddp_polite guest)."""

    hours: Optional[str]
    quiet_minutes: float
    battery_limit: int
    heat_limit: float
    load_limit: float


class _Sometimes(TypedDict, total=False):
    guest: Guest
    join_flags: Dict[str, object]  # of the launcher that joins the ranks of a checkout
    keeper_port: int  # where it listens
    open_ports: List[int]  # to be opened on this host beside data_ports
    session_argv: List[str]  # what the session runs in the place of argv: the keeper


class Interpreter(TypedDict):
    """The Python of a host's environment; None where none was found, or its version is unknown."""

    python: Optional[str]  # what the venv is made with
    python_version: Optional[str]


class Node(_Sometimes, Interpreter):
    """One host's share; with a keeper also where that listens and what its session runs."""

    host: str  # inventory name
    rank: int
    address: Optional[str]
    nic: Optional[str]  # lo where all nodes are on one machine
    data_ports: Ports  # of this host, the only ones that are opened on it
    user: Optional[str]
    base_dir: str
    run_dir: str
    data_dir: str  # the store; run_dir/data holds exactly the plan's shards
    trainer_dir: str  # where argv is run
    tools_dir: str  # this collection's own trainer, tools/ beside another one
    venv_dir: str
    session: str
    device: str
    dtype: str
    threads: int
    cores: Optional[List[int]]  # processors to which the rank is pinned (NANOCHAT_CORES)
    core_sets: List[CoreSet]  # sets of processors that the rehearsal times
    rows: int  # of this rank in each step
    head_share: int  # weight of this rank's part of a shared head
    accumulation: int  # passes of device_batch rows at most
    memory_bytes: int  # estimate
    disk_bytes: int  # estimate
    checkpoint_bytes: int  # estimate
    peers: List[str]  # addresses of the nodes on other machines
    flags: Dict[str, object]  # of the trainer: numbers, texts, true for a switch, a list by rank
    argv: List[str]  # complete; argv[0] is the venv's Python; made from all the rest by _contract/command_line.py
    env: Dict[str, str]  # complete but for the secrets
    env_secret: List[str]  # names in ddp_secret_env, whose values go into the env file and nowhere else


class Conversations(TypedDict):
    """A file of conversations for fine-tuning."""

    path: str  # on the controller
    sha256: Optional[str]
    count: int


class ConversationFacts(Conversations):
    """Conversations as the controller sees them, with what is wrong."""

    problems: List[str]


class _OfStage(TypedDict, total=False):
    step: Optional[int]  # eval: the step that is measured
    conversations: Conversations  # sft: conversations.jsonl in the run folder
    held_out: Conversations  # sft: conversations-val.jsonl in the run folder
    script: str  # a checkout's own mid and sft


class Stage(_OfStage):
    """The stage of a run that uses the model of another run: it trains on, fine-tunes or evaluates it."""

    stage: str  # mid, sft or eval
    base: str  # the run whose model it goes on from


class _Last(TypedDict, total=False):
    stage: Stage  # only if it continues the model of another run
    keeper: Keeper  # only with ddp_restarts
    digest: str  # 16 hexadecimal digits


class Plan(_Last):
    """The document that everything after the plan step reads; the digest is that of all the rest."""

    format: int  # 1
    run: str  # name of the run
    world: int  # number of ranks
    master: Master
    data_ports: Ports  # where Gloo and the shard servers of all hosts listen, or the narrowed range
    narrow_ports: bool  # whether the hosts' local port range is to be narrowed to data_ports
    manage_firewall: bool
    timeout_seconds: int  # every wait is derived from it
    model: Model
    training: Training
    data: Data
    trainer: Trainer
    nodes: List[Node]  # by rank


class Controller(TypedDict):
    """Settings of what the controller itself does; no part of the document."""

    watch: bool
    stall_factor: float
    results_dir: str
    collect_checkpoints: bool
    live_page: bool
    strict: bool
    fresh: bool


class HostQuestion(TypedDict):
    """The options of host_info for one host."""

    base_dir: str
    run_dir: str
    base_run: Optional[str]
    venv_dir: Optional[str]
    python: Optional[str]
    ports: List[int]
    folders: List[str]
    peers: List[str]


class ControllerQuestion(TypedDict):
    """The plan's questions to the controller: folders, a repository, a trainer with its flags, conversations,
    and where results go."""

    folders: List[str]
    git: Optional[str]
    trainer: Optional[str]
    script: str
    flags: List[str]
    results: str
    conversations: Optional[str]
    held_out: Optional[str]


class _Probed(TypedDict, total=False):
    probe: Optional[Mapping[str, object]]
    error: Optional[str]
    reach: Optional[str]


class Given(_Probed):
    """A host as the inventory and its probe have it; `error` says why there is no probe, `reach` how other hosts would call it."""

    name: str
    settings: Mapping[str, object]
