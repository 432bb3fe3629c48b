# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings that only make sense together, or not on these hosts."""

from __future__ import annotations

import itertools
import re
from typing import Any, Iterator, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import stages
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.command import Choice, flag_names
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.head import can_share
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import (
    LEAST_BLOCK,
    SMEAR_INPUTS,
    WIRE_BYTES,
    Shape,
    packs,
)

# What the launcher that joins a checkout's ranks knows (trainer/scripts/join.py).
JOINED_SYNC = ("exact", "bf16", "int8", "dense")
TORCHRUN_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
PLAN_ENV = ("NANOCHAT_BASE_DIR", "NANOCHAT_DATA_DIR", "NANOCHAT_DTYPE", "NANOCHAT_DDP_SESSION", "GLOO_SOCKET_IFNAME")


def problems(run: Mapping[str, Any], hosts: Sequence[Host], shape: Shape, choice: Choice) -> list[Finding]:
    """Everything that does not fit; what is set for the whole run is no single host's."""
    sentences = [
        *model_problems(shape),
        *stages.problems(run, choice.ours, choice.joined),
        *schedule_problems(run),
        *port_problems(run),
        *keeper_problems(run, hosts, choice),
        *data_problems(run),
        *source_problems(run, choice),
        *way_problems(run, hosts, shape, choice),
        *head_problems(run, choice),
        *precision_problems(run, hosts, choice),
        *extra_problems(run, choice),
    ]
    return [finding("setting-refused", "", sentence.rstrip(".")) for sentence in sentences]


def model_problems(shape: Shape) -> Iterator[str]:
    if shape.head_dim % 2:
        yield f"ddp_head_dim is {shape.head_dim}; it must be even, since rotary embeddings turn pairs: use {shape.head_dim + 1}."
    if shape.n_embd < SMEAR_INPUTS:
        yield (
            f"ddp_depth {shape.depth} x ddp_aspect_ratio {shape.aspect_ratio} with ddp_head_dim {shape.head_dim} makes a model "
            f"{shape.n_embd} wide; it must be at least {SMEAR_INPUTS}: use ddp_aspect_ratio 64."
        )


def schedule_problems(run: Mapping[str, Any]) -> Iterator[str]:
    for name in ("ddp_eval_every", "ddp_sample_every", "ddp_save_every", "ddp_keep_checkpoints"):
        if run[name] == 0:
            yield f"{name} is 0; it must be at least 1, or -1 for {'all' if 'keep' in name else 'none'}."


def port_problems(run: Mapping[str, Any]) -> Iterator[str]:
    """Ports of the job that are the same, or among those on which Gloo listens."""
    used = {
        "ddp_port": True,
        "ddp_tracker_port": run["ddp_tracker"] == "mlflow",
        "ddp_keeper_port": run["ddp_restarts"],
    }
    names = [name for name, wanted in used.items() if wanted]
    low, high = run["ddp_port_range"] or (0, -1)
    for name in names:
        if low <= run[name] <= high:
            yield f"{name} {run[name]} lies in ddp_port_range {low}-{high}; use a port outside it."
    for name, other in itertools.combinations(names, 2):
        if run[name] == run[other]:
            yield f"{other} and {name} are both {run[name]}; they must differ."


def keeper_problems(run: Mapping[str, Any], hosts: Sequence[Host], choice: Choice) -> Iterator[str]:
    """What must be so for a run to start again by itself."""
    if run["ddp_min_hosts"] > len(hosts):
        yield f"ddp_min_hosts is {run['ddp_min_hosts']}, but this job has {len(hosts)} hosts; 0 stands for all of them."
    if run["ddp_min_hosts"] and not run["ddp_restarts"]:
        yield "ddp_min_hosts is set, but ddp_restarts is 0, so a run that lost a host ends; set ddp_restarts, 3 for instance."
    if run["ddp_survive_reboot"] and not run["ddp_restarts"]:
        yield "ddp_survive_reboot is set, but ddp_restarts is 0, so nothing could take part again; set ddp_restarts, 3 for instance."
    if run["ddp_restarts"] and not choice.ours:
        yield "ddp_restarts needs the trainer of this collection (ddp_trainer_source: ours); another one cannot go on with fewer hosts."
    if run["ddp_restarts"] and not run["ddp_resume"]:
        yield "ddp_restarts needs ddp_resume, or each restart would begin at the first step."


def data_problems(run: Mapping[str, Any]) -> Iterator[str]:
    source, paths = run["ddp_data_source"], run["ddp_data_paths"]
    where = "the controller" if source == "controller" else run["ddp_data_host"] or "the master"
    if source in ("host", "controller") and not paths:
        yield f"ddp_data_source is {source}, but ddp_data_paths is empty; it must name the folder of shards on {where}."
    if source in ("host", "controller") and len(paths) > 2:
        yield (
            f"ddp_data_paths names {len(paths)} folders, but with ddp_data_source {source} it is the folder of shards and, where "
            "that lies elsewhere, the one of the tokenizer."
        )
    for path in paths:
        if not re.match(r"[/~]", path):
            yield f"ddp_data_paths holds {path!r}; it must be an absolute path on {where}, or begin with ~."
    if run["ddp_data_source"] == "url" and run["ddp_data_shards"] > run["ddp_data_last_shard"] + 1:
        yield (
            f"ddp_data_shards is {run['ddp_data_shards']}, but the collection has {run['ddp_data_last_shard'] + 1} "
            "(ddp_data_last_shard + 1); use that or fewer."
        )


def source_problems(run: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    if choice.ours:
        return
    for name, known in (
        ("ddp_batch_split", ("equal",)),
        ("ddp_sync", JOINED_SYNC if choice.joined else ("exact",)),
        ("ddp_local_steps", (0,)),
        ("ddp_head", ("auto",)),
        ("ddp_matmul", ("fp32",)),
    ):
        # auto adapts to the trainer by itself.
        if run[name] not in (*known, "auto"):
            yield (
                f"{name} is {run[name]}, which only this collection's own trainer knows; with ddp_trainer_source "
                f"{run['ddp_trainer_source']} it must be {' or '.join(map(str, known))}."
            )
    if run["ddp_tracker"] == "mlflow" and not choice.joined:
        yield (
            "ddp_tracker is mlflow, to which nanochat's own trainer reports nothing where its ranks are not joined "
            "(ddp_trainer_join, on CPUs); it must be none or wandb."
        )


def way_problems(run: Mapping[str, Any], hosts: Sequence[Host], shape: Shape, choice: Choice) -> Iterator[str]:
    """Against the ways of coming to one model, as they are set or as `auto` would decide them; auto itself is none."""
    yield from local_problems(run, hosts, choice)
    yield from packing_problems(run, shape, choice)


def local_problems(run: Mapping[str, Any], hosts: Sequence[Host], choice: Choice) -> Iterator[str]:
    every = run["ddp_local_steps"]
    if not every or every == "auto" or not choice.ours:
        return
    if run["ddp_sync"] not in (*WIRE_BYTES, "auto"):
        yield (
            f"ddp_local_steps is {every}, but ddp_sync {run['ddp_sync']} does not go with local steps; "
            f"use {', '.join(WIRE_BYTES)} or auto."
        )
    if choice.device == "cuda":
        yield f"ddp_local_steps is {every}, which is for CPUs on slow links; with ddp_device cuda it must be 0."
    if len(hosts) > 1 and every > run["ddp_iterations"]:
        yield (
            f"ddp_local_steps is {every}, but the run has {run['ddp_iterations']} steps (ddp_iterations), so the hosts would "
            "meet at its end only."
        )


def packing_problems(run: Mapping[str, Any], shape: Shape, choice: Choice) -> Iterator[str]:
    if not choice.together or not packs(run["ddp_sync"]):
        return
    if choice.device == "cuda":
        yield f"ddp_sync is {run['ddp_sync']}, which is for CPUs on slow links; with ddp_device cuda use exact or bf16."
    if shape.n_embd % LEAST_BLOCK:
        yield (
            f"ddp_sync is {run['ddp_sync']}, but a model {shape.n_embd} wide does not divide into blocks of {LEAST_BLOCK}; "
            "use exact or bf16."
        )


def head_problems(run: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    # auto comes to none of the ways that a shared head does not go with.
    sync = "exact" if run["ddp_sync"] == "auto" else run["ddp_sync"]
    if run["ddp_head"] == "shared" and choice.ours and not can_share(choice.device, sync):
        yield (
            "ddp_head is shared, which takes CPUs and a ddp_sync other than dense and ddp; "
            f"here they are {choice.device} and {run['ddp_sync']}."
        )


def precision_problems(run: Mapping[str, Any], hosts: Sequence[Host], choice: Choice) -> Iterator[str]:
    if choice.device == "cuda":
        lacking = [host.name for host in hosts if host.probe and not host.fact("gpus")]
        if lacking:
            yield f"ddp_device is cuda, but {' and '.join(lacking)} has no NVIDIA GPU; use cpu."
        return
    if run["ddp_dtype"] == "float16":
        yield "ddp_dtype is float16, which CPUs compute slowly and inexactly; use float32."
    for name in ("ddp_dtype", "ddp_matmul"):
        slow = [host.name for host in hosts if host.probe and not host.fact("cpu", "native_bf16")]
        if run[name] in ("bfloat16", "bf16") and slow:
            yield (
                f"{name} is {run[name]}, but the CPU of {' and '.join(slow)} has no instructions for it and would be many "
                f"times slower; use {'float32' if name == 'ddp_dtype' else 'fp32'}."
            )


def extra_problems(run: Mapping[str, Any], choice: Choice) -> Iterator[str]:
    for name in ("ddp_extra_env", "ddp_secret_env"):
        for variable in run[name]:
            if variable in TORCHRUN_ENV or variable in PLAN_ENV:
                owner = "torchrun" if variable in TORCHRUN_ENV else "the plan"
                yield f"{name} sets {variable}, which {owner} sets itself; take it out."
                continue
            try:
                env_file.checked({variable: run[name][variable]})
            except env_file.EnvFileError as error:
                yield f"{name} cannot be passed on: {error}."
    flags = flag_names(run, choice)
    for word in run["ddp_extra_args"]:
        flag = word.split("=")[0]
        if flag in flags:
            yield f"ddp_extra_args holds {flag}, which the plan sets itself; use the setting of that name."
