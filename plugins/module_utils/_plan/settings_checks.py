# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks settings that depend on each other or on these hosts."""

from __future__ import annotations

import itertools
import re
from typing import Iterator, Sequence

from .._contract import politeness
from .._contract.settings_table import AUTO, LAST_SHARD, RunSettings
from .._kit import env_file
from .._kit.words import named, plural
from .._rules.model_size import SMEAR_CHANNELS, ModelConfig
from .._rules.ways import LEAST_BLOCK, fits
from . import stages
from .command import flag_names, flags_in
from .decided import Decided
from .hosts import Host

TORCHRUN_ENV = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
# What else env of command.py sets, such as OMP_NUM_THREADS, a user may set otherwise.
PLAN_ENV = (
    "NANOCHAT_BASE_DIR", "NANOCHAT_DATA_DIR", "NANOCHAT_DTYPE", "NANOCHAT_DDP_SESSION", politeness.VARIABLE, "GLOO_SOCKET_IFNAME",
)  # fmt: skip


def problems(decided: Decided) -> Iterator[str]:
    """All conflicts in the settings."""
    run, hosts, shape = decided.asked, decided.hosts, decided.shape
    yield from model_problems(run, shape, hosts)
    yield from schedule_problems(run, decided)
    yield from guest_problems(hosts, decided)
    yield from data_problems(run)
    yield from extra_problems(run, decided)


def model_problems(run: RunSettings, shape: ModelConfig, hosts: Sequence[Host]) -> Iterator[str]:
    """Sizes that no model can have, a ddp_sync that this one cannot, and a ddp_matmul that these CPUs cannot."""
    if shape.head_dim % 2:
        yield f"ddp_head_dim is {shape.head_dim}; it must be even, because rotary embeddings rotate pairs: use {shape.head_dim + 1}."
    if shape.n_embd < SMEAR_CHANNELS:
        yield (
            f"ddp_depth {run.depth} x ddp_aspect_ratio {run.aspect_ratio} with ddp_head_dim {shape.head_dim} makes a model "
            f"{shape.n_embd} wide; it must be at least {SMEAR_CHANNELS}: use ddp_aspect_ratio 64."
        )
    if run.sync != AUTO and not fits(run.sync, shape.n_embd):
        yield f"ddp_sync is {run.sync}, but a model {shape.n_embd} wide cannot be divided into blocks of {LEAST_BLOCK}; use exact or bf16."
    slow = [host.name for host in hosts if host.probe and not host.fact("cpu", "native_bf16")]
    if run.matmul == "bf16" and slow:
        yield (
            f"ddp_matmul is bf16, but the CPU of {' and '.join(slow)} has no instructions for it and would be many times slower; "
            "use fp32."
        )


def schedule_problems(run: RunSettings, decided: Decided) -> Iterator[str]:
    """Numbers of steps that are zero or leave an evaluation out, equal ports, and missing settings for automatic restarts."""
    every = {"ddp_eval_every": run.eval_every, "ddp_sample_every": run.sample_every, "ddp_save_every": run.save_every}
    for name, value in {**every, "ddp_keep_checkpoints": run.keep_checkpoints}.items():
        if value == 0:
            yield f"{name} is 0; it must be at least 1, or -1 for {'all' if 'keep' in name else 'none'}."
    if run.stage == stages.SFT and run.sft_val_data and run.eval_every < 1:
        yield "ddp_sft_val_data is set, but ddp_eval_every is -1, so nothing would be evaluated; set ddp_eval_every, for example to 50."
    used = {"ddp_port": run.port}
    if run.tracker == "mlflow":
        used["ddp_tracker_port"] = run.tracker_port
    if decided.run.restarts:
        used["ddp_keeper_port"] = run.keeper_port
    for name, other in itertools.combinations(used, 2):
        if used[name] == used[other]:
            yield f"{other} and {name} are both {used[name]}; they must differ."
    restarts, min_hosts, world = decided.run.restarts, decided.run.min_hosts or 0, len(decided.hosts)
    if min_hosts > world:
        yield f"ddp_min_hosts is {min_hosts}, but this job has {world} hosts; 0 means all of them."
    for name, value in {"ddp_min_hosts": min_hosts, "ddp_survive_reboot": decided.run.survive_reboot}.items():
        if value and not restarts:
            yield f"{name} is set, but ddp_restarts is 0, so no host could rejoin; set ddp_restarts, for example to 3."
    if restarts and not run.resume:
        yield "ddp_restarts needs ddp_resume, or each restart would begin at step 0."


def guest_problems(hosts: Sequence[Host], decided: Decided) -> Iterator[str]:
    """Settings with which a guest could not leave or return, and limits set for a host that is not a guest."""
    guests = [host for host in hosts if host.settings.polite == politeness.GUEST]
    for host in hosts:
        changed = [name for name in ("hours", "away_if") if getattr(host.settings, name)]
        if changed and host not in guests:
            yield f"ddp_{changed[0]} is set on {host.name}, but only a guest leaves by it; set ddp_polite to guest there, or take it out."
    run, least = decided.run, max(1, len(hosts) - len(guests))
    may_leave = len(hosts) == 1 or 0 < (run.min_hosts or 0) < len(hosts)
    if guests and not (run.resume and run.restarts and may_leave):
        who = named([host.name for host in guests])
        needs = f"ddp_resume, ddp_restarts (3 for instance) and ddp_min_hosts ({least} for instance)"
        yield f"ddp_polite is guest on {who}, which leaves and comes back by {needs}; set them, or use low."


def data_problems(run: RunSettings) -> Iterator[str]:
    source, paths = run.data_source, run.data_paths
    where = "the controller" if source == "controller" else run.data_host or "the master"
    if source in ("host", "controller") and len(paths) not in (1, 2):
        names = f"ddp_data_source is {source}, but ddp_data_paths names {plural(len(paths), 'folder')}"
        yield f"{names}; it must be that of the shards on {where} and, if it lies elsewhere, that of their tokenizer."
    for path in paths:
        if not re.match(r"[/~]", path):
            yield f"ddp_data_paths holds {path!r}; it must be an absolute path on {where}, or start with ~."
    if run.data_source == "url" and run.data_shards > LAST_SHARD + 1:
        yield f"ddp_data_shards is {run.data_shards}, but the collection has {LAST_SHARD + 1}; use that or fewer."


def extra_problems(run: RunSettings, decided: Decided) -> Iterator[str]:
    for name, variables in (("ddp_extra_env", run.extra_env), ("ddp_secret_env", run.secret_env)):
        for variable in variables:
            if variable in TORCHRUN_ENV or variable in PLAN_ENV:
                owner = "torchrun" if variable in TORCHRUN_ENV else "the plan"
                yield f"{name} sets {variable}, which {owner} sets itself; remove it."
                continue
            try:
                env_file.checked({variable: variables[variable]})
            except env_file.EnvFileError as error:
                yield f"{name} cannot be passed on: {error}."
    further, strays = flags_in(run.extra_args)
    for word in strays:
        yield f"ddp_extra_args holds {word!r}, which follows no flag; write --name=value."
    for flag in flag_names(decided):
        if flag[2:] in further:
            yield f"ddp_extra_args holds {flag}, which the plan sets itself; use the setting of that name."
