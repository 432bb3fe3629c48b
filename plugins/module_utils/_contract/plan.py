# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a plan looks like: plan.json of docs/architecture.md. Out of a file that may hold anything it is read by document.py."""

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
    head_shares: List[int]


class Training(_Parts):
    """How it is trained."""

    profile: str
    total_batch: int
    device_batch: int
    batch_split: str
    rows: List[int]
    iterations: int
    tokens: int
    tokens_per_parameter: float
    flops: int
    sync: str
    head: str
    asked: Dict[str, str]
    local_steps: int
    rebalance: bool
    matmul: str
    matmul_tried: List[str]
    eval_every: int
    eval_tokens: int
    sample_every: int
    save_every: int
    save_minutes: int
    keep_checkpoints: int
    resume: bool
    tracker: str
    tracker_port: int
    tracker_bind: str


class DataContents(TypedDict):
    """What a data set is made of; its id is a digest of this."""

    source: str
    paths: List[str]
    url: Optional[str]
    shards: int
    vocab_size: int
    names: Optional[List[str]]


class Data(DataContents):
    """The data set, and the host that it comes from."""

    id: str
    host: str


class _Joined(TypedDict, total=False):
    joined: bool


class Trainer(_Joined):
    """What trains, and with which packages."""

    source: str
    url: Optional[str]
    torch: str
    index: str
    python: str
    uv: str
    python_mirror: str
    requirements: List[str]
    tracker_requirements: List[str]
    offline: bool


class Keeper(TypedDict):
    restarts: int
    min_hosts: int
    grace_seconds: int
    survive_reboot: bool  # what the keepers of a run go by


class _Kept(TypedDict, total=False):
    keeper_port: int
    open_ports: List[int]
    session_argv: List[str]


class Interpreter(TypedDict):
    """What a host's environment is made with; None where none was found, or nothing is known of its version."""

    python: Optional[str]
    python_version: Optional[str]


class Node(_Kept, Interpreter):
    """One host's share; with a keeper also where that listens and what its session runs."""

    host: str
    rank: int
    address: Optional[str]
    nic: Optional[str]
    data_ports: Ports
    user: Optional[str]
    base_dir: str
    run_dir: str
    data_dir: str
    trainer_dir: str
    tools_dir: str
    venv_dir: str
    session: str
    device: str
    dtype: str
    threads: int
    cores: Optional[List[int]]
    core_sets: List[CoreSet]
    rows: int
    head_share: int
    accumulation: int
    memory_bytes: int
    disk_bytes: int
    checkpoint_bytes: int
    peers: List[str]
    argv: List[str]
    env: Dict[str, str]
    env_secret: List[str]


class Conversations(TypedDict):
    """What a fine-tuning learns from; on each host it is in the run folder."""

    path: str
    sha256: Optional[str]
    count: int


class ConversationFacts(Conversations):
    """What the controller sees of them, and what is wrong."""

    problems: List[str]


class _OfStage(TypedDict, total=False):
    step: Optional[int]
    conversations: Conversations
    held_out: Conversations
    script: str


class Stage(_OfStage):
    """What is done with the model of another run, the base; an evaluation is of a step, a fine-tuning has conversations,
    and where such are held out others to be evaluated on; a checkout's script brings data of its own."""

    stage: str
    base: str


class _Last(TypedDict, total=False):
    stage: Stage
    keeper: Keeper
    digest: str


class Plan(_Last):
    """The document that everything after the plan step reads; the digest is that of all the rest."""

    format: int
    run: str
    world: int
    master: Master
    data_ports: Ports
    narrow_ports: bool
    manage_firewall: bool
    timeout_seconds: int
    model: Model
    training: Training
    data: Data
    trainer: Trainer
    nodes: List[Node]


class Controller(TypedDict):
    """Settings of what the controller itself does; no part of the document."""

    watch: bool
    stall_factor: float
    results_dir: str
    collect_checkpoints: bool
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
    """What the plan wants to know of the controller: folders, a repository, a trainer with its flags, conversations,
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
