# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every setting of a job, one row each: its type, default, reason, limits and trainer flag.

A row is a field of RunSettings or HostSettings, so the rest of the code reads settings as typed attributes of a frozen object.
inventory/group_vars/trainers.yml and docs/settings.md are written from these rows; a row with `flag` reaches the trainer by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from .._rules import ways
from .._rules.stages import STAGES
from .politeness import GUEST, LOW, OFF
from .run_folder import GIVEN_NAME, RUN_NAME_HELP

RUN, HOST = "run", "host"
PREFIX = "ddp_"
AUTO = "auto"

DATA_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
LAST_SHARD = 6542  # of that collection, for validation

# Facts and switches of the collection's own that share the prefix and are no settings.
NOT_SETTINGS = frozenset((
    "ddp_probe", "ddp_probe_error", "ddp_plan", "ddp_node", "ddp_plan_findings", "ddp_controller", "ddp_tolerant", "ddp_plan_file",
    "ddp_json", "ddp_rights", "ddp_rights_refused", "ddp_links", "ddp_ways", "ddp_judged", "ddp_so_far", "ddp_launched",
    "ddp_purge",
))  # fmt: skip

# Settings of earlier versions: what to do instead, and the values that ask for what is done now anyway, which are ignored.
# fmt: off
REMOVED_SETTINGS: Dict[str, Tuple[str, ...]] = {
    "ddp_training": ("a run is one training. Remove it; where hosts hold two, the plan says how to set one aside",),
    "ddp_device": ("training is on CPUs. Remove it", "auto", "cpu"),
    "ddp_dtype": ("numbers are float32. Remove it; ddp_matmul is the precision of matrix products", "auto", "float32"),
    "ddp_trainer_source": ("the collection has its own trainer. Remove it, and see docs/guides/upstream.md", "ours"),
    "ddp_trainer_join": ("the collection trains with its own trainer. Remove it", "true"),
    "ddp_quiet_minutes": ("a guest comes back after one quiet minute. Remove it", "1", "10"),
    "ddp_heat_limit": ("ddp_away_if is a command for that. Remove it, and see docs/guides/polite-guest.md", "95"),
    "ddp_load_limit": ("a guest leaves where other programs use more than half a core. Remove it", "0.5"),
    "ddp_battery_limit": ("a guest leaves as soon as it is on battery. Remove it; with ddp_polite low a host trains on battery", "100"),
    "ddp_strict": ("warnings never stop a run. Remove it, and read the findings of nanochat.ddp.preflight first", "false"),
    "ddp_python_mirror": ("uv has a setting for that. Remove it, and set python-install-mirror in ~/.config/uv/uv.toml there",),
    "ddp_data_last_shard": ("it is 6542. Remove it; copy the shards of another collection and use ddp_data_source host", "6542"),
    "ddp_stall_factor": ("a step of five times the usual length is examined. Remove it", "5"),
    "ddp_collect_checkpoints": ("the newest checkpoint is always copied to the controller. Remove it", "true"),
    "ddp_tracker_bind": ("MLflow listens on the master only. Remove it; ssh -L shows it elsewhere", "127.0.0.1", "localhost"),
    "ddp_cores": ("a rank computes on one processor of every fast core. Remove it; ddp_threads limits their number",),
    "ddp_live_page": ("the report is the one page. Remove it; nanochat.ddp.collect renews it while the run goes on", "false"),
    "ddp_port_range": ("the data ports are a host's own local ports (sysctl net.ipv4.ip_local_port_range). Remove it",),
    "ddp_rebalance": ("shares follow the hosts' speeds. Remove it; ddp_batch_split equal or threads keeps them", "true"),
    "ddp_torch_index": ("uv asks PyTorch's index, then pip's. Remove it; ddp_torch 2.13.0+cuda accepts a CUDA build", "auto"),
}
# fmt: on
ALIASES = {"watch": "ddp_watch"}
PROFILE_NAMES = ("smoke", "real")

# The kinds of value that longer types of fields stand for; settings.py reads and checks values by kind.
KINDS = {"Tuple[str, ...]": "list", "Mapping[str, str]": "dict"}


class Setting(NamedTuple):
    """One row: a variable that an inventory may set."""

    name: str  # as the inventory has it
    field: str  # as the code has it
    kind: str  # str, int, float, bool, list, dict
    default: Any  # None: from the profile or worked out by the plan
    scope: str
    why: str
    section: str
    choices: Tuple[str, ...] = ()
    low: Optional[float] = None
    most: Optional[int] = None  # beyond it a plan would never be finished, or describe no machine that there is
    pattern: str = ""
    takes: str = ""  # the accepted values in words, where type and lower limit do not say them
    empty: str = ""  # the meaning of an unset value
    smoke: Any = None  # defaults of the profiles
    real: Any = None
    flag: str = ""  # the trainer's flag that is given this value, or the decision where the plan makes one

    @property
    def from_profile(self) -> bool:
        """Whether the default comes from the profile."""
        return self.smoke is not None


def setting(section: str, default: Any, why: str, scope: str = RUN, **more: Any) -> Any:
    """A row as the field of a dataclass; `more` are the further columns of Setting."""
    given = {"section": section, "default": default, "why": why, "scope": scope}
    # Called in the bodies of the dataclasses below, only through this function.
    return dataclasses.field(metadata={**given, **more})  # pylint: disable=invalid-field-call


_run = functools.partial(setting, "The run")
_model = functools.partial(setting, "The model")
_training = functools.partial(setting, "The training")
_network = functools.partial(setting, "The network")
_trainer = functools.partial(setting, "The trainer")
_data = functools.partial(setting, "The data")
_fine_tuning = functools.partial(setting, "Fine-tuning (ddp_stage sft)")
_watching = functools.partial(setting, "Watching and collecting")
_host = functools.partial(setting, "Each host", scope=HOST)


# fmt: off
@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings of the whole run, the same for every host."""

    # The run
    profile: str = _run(
        "smoke", "Fills in settings that you leave empty: smoke is a ten-step trial, real is the real training.", choices=PROFILE_NAMES,
    )
    stage: str = _run(
        "base", "base trains a model; sft fine-tunes it on conversations, as the run NAME-sft.",
        choices=tuple(STAGES),
    )
    run: Optional[str] = _run(
        None, "Name of the run, its folder and its sessions on every host.",
        pattern=GIVEN_NAME, takes=RUN_NAME_HELP, empty="d and the depth, for example d4",
    )
    resume: bool = _run(True, "Resume from the newest checkpoint that any host has.", flag="resume")
    fresh: bool = _run(False, "Start from scratch; earlier outputs of the run move to previous/1, previous/2 and so on in its folder.")
    timeout: int = _run(
        300, "Seconds to wait for a missing rank before the run ends and names it; all other timeouts derive from this one.",
        low=10, most=1_000_000, flag="timeout-seconds",
    )
    restarts: int = _run(
        None, "Each host's keeper restarts the run after an error, at most this often an hour; a host that goes away is no error. 0: none.",
        smoke=0, real=3, low=0,
    )
    min_hosts: Optional[int] = _run(
        None, "With ddp_restarts: continue without lost hosts while this many are left; they rejoin when they are back. 0: all hosts.",
        low=0, empty="smoke all hosts, real half of them, rounded up",
    )
    grace: int = _run(30, "With ddp_restarts: seconds to wait for a lost host before the others continue without it.", low=0)
    survive_reboot: bool = _run(
        None, "With ddp_restarts: a host rejoins automatically after a reboot, by a systemd user unit.", smoke=False, real=True,
    )

    # The model
    depth: int = _model(
        None, "Number of Transformer layers, which sets the size of the model.", smoke=4, real=8, low=1, most=1000, flag="depth",
    )
    aspect_ratio: int = _model(
        None, "Model width per layer: the width is depth times this.", smoke=64, real=64, low=1, most=10_000, flag="aspect-ratio",
    )
    head_dim: int = _model(
        None, "Width of an attention head; the model width is rounded up to a multiple of it.",
        smoke=64, real=128, low=2, most=10_000, flag="head-dim",
    )
    sequence: int = _model(None, "Tokens per row of the batch.", smoke=512, real=1024, low=2, most=10_000_000, flag="max-seq-len")
    window_pattern: str = _model(
        "SSSL", "Attention window of each layer, repeated: L sees the whole sequence, S a quarter. The last layer is always L.",
        pattern="[SLsl]+", takes="the letters S and L, for example SSSL",
    )
    vocab_size: int = _model(
        None, "Vocabulary size of the tokenizer that is trained if the data has none.", smoke=4096, real=32768, low=265, most=10_000_000,
    )

    # The training
    device_batch: int = _training(
        None, "Rows per forward and backward pass; more rows need more memory.",
        smoke=2, real=2, low=1, most=100_000, empty="the profile's, or what suits the hosts' shares", flag="device-batch-size",
    )
    total_batch: int = _training(
        None, "Tokens per step, over all ranks.",
        smoke=2048, real=4096, low=1, empty="near the profile's, divisible by the number of hosts", flag="total-batch-size",
    )
    iterations: int = _training(None, "Number of training steps.", smoke=10, real=5000, low=1, flag="num-iterations")
    budget: Optional[str] = _training(
        None, "Total time including setup and collecting, instead of ddp_depth and ddp_iterations: the plan chooses a model that fits.",
        pattern=r"(\d{1,5}[dhm])+", takes="days, hours and minutes, for example 8h, 90m, 1d or 1h30m", empty="as long as its steps take",
    )
    finish_by: Optional[str] = _training(
        None, "The same as an end time by the controller's clock: the next 07:30, or a date and time.",
        pattern=r"(\d{4}-\d\d-\d\d[ T])?([01]?\d|2[0-3]):[0-5]\d",
        takes='a time such as "07:30" (with quotes in a file), or a date and time such as "2026-11-25 07:30"',
        empty="as long as its steps take",
    )
    batch_split: str = _training(
        "auto", "How hosts share a step's rows; speed: by ddp_speed or as measured, also while training; auto: by speed if it is known.",
        choices=("auto", "equal", "threads", "speed"),
    )
    eval_every: int = _training(
        None, "Steps between evaluations on the validation shard; -1 for none.", smoke=250, real=250, low=-1, flag="eval-every",
    )
    eval_tokens: int = _training(None, "Tokens per evaluation.", smoke=16384, real=65536, low=1, flag="eval-tokens")
    sample_every: int = _training(
        None, "Steps between samples of generated text; -1 for none.", smoke=-1, real=1000, low=-1, flag="sample-every",
    )
    save_every: int = _training(None, "Steps between checkpoints; -1 saves only at the end.", smoke=5, real=250, low=-1, flag="save-every")
    save_minutes: int = _training(
        None, "Also save after this many minutes without a checkpoint; 0: only by ddp_save_every.", smoke=30, real=10, low=0,
    )
    keep_checkpoints: int = _training(2, "Number of checkpoints to keep on each host; -1 keeps all.", low=-1, flag="keep-checkpoints")
    sync: str = _training(
        "auto", "exact: float32; bf16, int8, int4: rounded, for slow links; auto: the fastest that was measured.",
        choices=("auto", *ways.WAYS), flag="sync",
    )
    head: str = _training(
        "auto",
        "Output layer: whole, shared (in parts), or auto: what sends less; if you set ddp_min_hosts, shared only if over 5 % faster.",
        choices=("auto", "whole", "shared"), flag="head",
    )
    matmul: str = _training(
        "auto", "Precision of matrix products; auto: bf16 if all CPUs support it and measured faster with it, otherwise fp32.",
        choices=("auto", "fp32", "bf16"), flag="matmul",
    )
    kernels: str = _training(
        "auto", "Work between matrix products; auto: C kernels if a host can compile them and they are faster; zig: ziglang compiles them.",
        choices=("auto", "torch", "zig"), flag="kernels",
    )
    extra_args: Tuple[str, ...] = _training((), "Additional arguments for the training command, for example a learning rate.")
    extra_env: Mapping[str, str] = _training({}, "Additional environment variables of the training processes.")
    secret_env: Mapping[str, str] = _training({}, "The same, but masked in all output, for example WANDB_API_KEY.")

    # The network
    port: int = _network(29500, "Port on the master where the ranks meet.", low=1024, most=65535)
    keeper_port: int = _network(
        29501, "With ddp_restarts: port of the keeper on each host; nodes that share a machine use the next ports.", low=1024, most=65535,
    )
    manage_firewall: bool = _network(True, "Open an active firewall to the peers, and only to them.")

    # The trainer
    trainer_offline: bool = _trainer(
        False, "The hosts cannot reach a package index: the controller downloads the packages once and copies them.",
    )
    torch: str = _trainer(
        "2.13.0", "PyTorch version on every host, built for CPUs; 2.13.0+cuda also accepts the build for CUDA (3 GB to download).",
        pattern=r"\d+\.\d+(\.\d+)?[A-Za-z0-9.]*(\+cpu|\+cuda)?", takes="a version, for example 2.13.0",
    )

    # The data
    data_source: str = _data(
        None, "Source of the data: text on a host, numbered shards at a URL, or shards on a host or the controller.",
        smoke="text", real="url", choices=("text", "url", "host", "controller"),
    )
    data_host: Optional[str] = _data(
        None, "The host that has or downloads the text or shards; the others copy them from it.", empty="the master",
    )
    data_paths: Tuple[str, ...] = _data(
        (), "Folders on that host or the controller: text (empty: Python's library), or shards and, if elsewhere, their tokenizer.",
    )
    data_url: str = _data(
        DATA_URL, "Base URL of nanochat's shards, or of a mirror (source url).",
        pattern=r"https?://\S+", takes="a URL that begins with http:// or https://",
    )
    data_shards: int = _data(None, "Number of shards to use; the last one is for validation.", smoke=3, real=8, low=2, most=100_000)

    # Fine-tuning (ddp_stage sft)
    sft_data: Optional[str] = _fine_tuning(
        None, "File with conversations on the controller: one JSON list of role and content per line.",
        empty="a few exchanges that come with the trainer",
    )
    sft_val_data: Optional[str] = _fine_tuning(
        None, "Held-out conversations in the same format: evaluated in bits per byte of their answers, at ddp_eval_every and at the end.",
        empty="no evaluation",
    )
    sft_iterations: int = _fine_tuning(None, "Number of fine-tuning steps.", smoke=200, real=300, low=1)

    # Watching and collecting
    watch: bool = _watching(True, "Follow the run to its end. If false, the play returns once every rank made its first step.")
    results_dir: str = _watching("runs", "Folder on the controller for results.")
    tracker: str = _watching(
        "none", "Experiment tracker that the master also reports metrics to.", choices=("none", "mlflow", "wandb"), flag="tracker",
    )
    tracker_port: int = _watching(5000, "Port of the MLflow server, which listens on the master's loopback only.", low=1024, most=65535)


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Settings of one host, which may differ from host to host."""

    base_dir: str = _host(
        "~/nanochat-ddp", "Folder for everything that a job keeps on this host.",
        pattern="[/~].*", takes="an absolute path, or one that begins with ~",
    )
    venv_dir: Optional[str] = _host(
        None, "Folder of the trainer's Python environment; nodes that share a machine may share it.",
        pattern="[/~].*", takes="an absolute path, or one that begins with ~", empty="venv in the base folder",
    )
    python: Optional[str] = _host(
        None, "Python 3.10 or newer to create the trainer's environment with.",
        pattern="[/~].*", takes="an absolute path, or one that begins with ~", empty="one that all hosts have, if there is one",
    )
    address: Optional[str] = _host(None, "Address at which the peers reach this host.", empty="that of the NIC that leads to them")
    nic: Optional[str] = _host(None, "Network interface for the training traffic.", empty="the one that leads to the peers")
    rank: Optional[int] = _host(None, "Rank of this host; rank 0 is the master.", low=0, most=10_000, empty="by the order of the inventory")
    threads: Optional[int] = _host(None, "Number of compute threads.", low=1, most=10_000, empty="the physical cores this user may use")
    polite: str = _host(
        "auto",
        "low: yield to all other programs; guest: also leave while the machine is needed; auto: low if a desktop user is logged in.",
        choices=(AUTO, OFF, LOW, GUEST),
    )
    hours: Optional[str] = _host(
        None, "With ddp_polite guest: time of day in which this host trains, by its own clock, such as 22:00-07:00.",
        pattern=r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", takes="two times of day such as 22:00-07:00", empty="all day",
    )
    away_if: Optional[str] = _host(
        None, "With ddp_polite guest: a shell command, every ten seconds; the host also leaves while it ends with 0; its output is why.",
        pattern=r"[^\0\n]+", takes="a command of one line", empty="no further reason to leave",
    )
    speed: Optional[float] = _host(
        None, "Speed of this host relative to the others (ddp_batch_split auto and speed).", low=0.001, empty="as measured",
    )
# fmt: on


def rows() -> Mapping[str, Setting]:
    """The table: every setting by its name in an inventory."""
    return _table(RunSettings, HostSettings)


@functools.cache
def _table(run: Any, host: Any) -> Mapping[str, Setting]:
    found = {}
    for field in (*dataclasses.fields(run), *dataclasses.fields(host)):
        kind = re.sub(r"^Optional\[(.*)\]$", r"\1", str(field.type))
        more: Dict[str, Any] = {"empty": "profile" if "smoke" in field.metadata else "", **field.metadata}
        found[PREFIX + field.name] = Setting(PREFIX + field.name, field.name, KINDS.get(kind, kind), **more)
    return MappingProxyType(found)


def find(name: str) -> Setting:
    """The row of a setting."""
    return rows()[name]
