# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a rank is started with: the choices that follow from the settings, the command line and the environment."""

from __future__ import annotations

import itertools
import os
from typing import Any, Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Keeper, Node, Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import products, stages
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host, neighbours
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.stages import BASE, SCRIPTS, run_name
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import local_overlap

# Big buffers are reused instead of being given back to the kernel and faulted in again.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
# On cores that others use too, threads that spin without end take them from the thread they wait for.
SPINS = "20000"
FLIGHT_RECORD_ENTRIES = "2000"


# What the scripts of a checkout know that go on from a base model.
LATER_FLAGS = (
    "run", "model-tag", "device-type", "max-seq-len", "num-iterations", "device-batch-size", "total-batch-size", "eval-every",
    "eval-tokens",
)  # fmt: skip
# Scores for which they would download tests, and let one rank work for long.
UNMEASURED = {stages.SFT: {"chatcore-every": -1}}


class Choice(NamedTuple):
    """What all ranks have in common and no setting says alone."""

    name: str
    ours: bool
    joined: bool  # a nanochat checkout whose ranks the launcher joins to one training
    device: str
    dtype: str
    matmul: str
    matmul_tried: tuple[str, ...]  # what the rehearsal measures, for who leaves the choice to it
    stage: str

    @property
    def together(self) -> bool:
        """Whether the ranks train one model also on CPUs."""
        return self.ours or self.joined

    @property
    def goes_on(self) -> bool:
        """Whether it finds the newest checkpoint by itself, and removes older ones."""
        return self.ours or (self.joined and self.stage == BASE)


def choose(run: Mapping[str, Any], hosts: Sequence[Host]) -> Choice:
    """Settle what is left to the plan. A GPU decides nothing unless the settings ask for it."""
    device = str(run["ddp_device"])
    if device == "auto":
        device = "cuda" if all(host.fact("gpus") and neighbours(host, hosts) == 1 for host in hosts) else "cpu"
    dtype = str(run["ddp_dtype"])
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    ours = run["ddp_trainer_source"] == "ours"
    matmul, tried = str(run["ddp_matmul"]), False
    if matmul == "auto":
        matmul = "bf16" if dtype == "bfloat16" else "fp32"
        tried = (
            ours and device == "cpu" and dtype == "float32" and all(host.fact("cpu", "native_bf16") for host in hosts)
        )
    if tried:
        began = [] if run["ddp_fresh"] else [host.fact("run", "matmul") for host in hosts]
        matmul = products.taken(began, [host.fact("measured") for host in hosts])
    # On GPUs a checkout joins its ranks itself.
    joined = not ours and device == "cpu" and run["ddp_trainer_join"]
    return Choice(
        run_name(run),
        ours,
        joined,
        device,
        dtype,
        matmul,
        products.TRIED if tried else (matmul,),
        str(run["ddp_stage"]),
    )


def argv(run: Mapping[str, Any], choice: Choice, node: Node, plan: Plan) -> list[str]:
    """What starts a rank: one agent of torchrun, which starts the trainer."""
    scripts = os.path.join(node["tools_dir"], "scripts")
    # Ours is torchrun too, but ends with a sentence and not with a traceback.
    agent = ["-m", "scripts.torchrun" if choice.ours else "torch.distributed.run"]
    # Without -- torchrun takes the trainer's flags for shortened ones of its own.
    script = ["-m", SCRIPTS[run["ddp_stage"]], "--"]
    if choice.joined:
        agent = [os.path.join(scripts, "torchrun.py")]
        script = [os.path.join(scripts, "join.py"), "--", *join_flags(run, choice, node, plan), SCRIPTS[choice.stage]]
    return [
        os.path.join(node["venv_dir"], "bin", "python"),
        *agent,
        f"--nnodes={plan['world']}",
        f"--node-rank={node['rank']}",
        "--nproc-per-node=1",
        f"--master-addr={plan['master']['address']}",
        f"--master-port={plan['master']['port']}",
        f"--local-addr={node['address']}",
        f"--rdzv-conf=timeout={plan['timeout_seconds']}",
        "--max-restarts=0",
        *script,
        *trainer_flags(
            run, choice, node["run_dir"], plan["training"], plan["stage"].get("step") if "stage" in plan else None
        ),
    ]


def join_flags(run: Mapping[str, Any], choice: Choice, node: Node, plan: Plan) -> list[str]:
    """The flags of the launcher that joins a checkout's ranks."""
    flags = {
        "run-dir": node["run_dir"],
        "timeout-seconds": plan["timeout_seconds"],
        "sync": plan["training"]["sync"],
        "keep-checkpoints": run["ddp_keep_checkpoints"],
    }
    if run["ddp_tracker"] == "mlflow":
        flags.update({"tracker": "mlflow", "tracker-uri": tracker_uri(run)})
    begin = [f"--base-checkpoints={folder}" for folder in stages.folders_to_begin_with(run, node["run_dir"])]
    resume = ["--resume"] if run["ddp_resume"] and choice.goes_on else []
    return [*(f"--{name}={value}" for name, value in flags.items()), *begin, *resume]


def tracker_uri(run: Mapping[str, Any]) -> str:
    bind = run["ddp_tracker_bind"]
    address = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(bind, bind)
    return f"http://{f'[{address}]' if ':' in address else address}:{run['ddp_tracker_port']}"


def keeper(run: Mapping[str, Any], hosts: int) -> Keeper | None:
    """What the keepers of a run go by; None where there are none."""
    if not run["ddp_restarts"]:
        return None
    return {
        "restarts": run["ddp_restarts"],
        "min_hosts": run["ddp_min_hosts"] or hosts,
        "grace_seconds": run["ddp_grace"],
        "survive_reboot": run["ddp_survive_reboot"],
    }


def may_lose_hosts(run: Mapping[str, Any], hosts: int) -> bool:
    """Whether the run is to go on with fewer hosts than it has."""
    return bool(run["ddp_restarts"] and 0 < run["ddp_min_hosts"] < hosts)


def keeper_ports(run: Mapping[str, Any], hosts: int) -> list[int]:
    """The ports at which keepers may come to listen on a host; more than one where nodes share a machine, none of them the run's others."""
    if not run["ddp_restarts"]:
        return []
    low, high = run["ddp_port_range"] or (0, -1)
    others = (run["ddp_port"], run["ddp_tracker_port"])
    free = (port for port in itertools.count(run["ddp_keeper_port"]) if port not in others and not low <= port <= high)
    return list(itertools.islice(free, hosts))


def add_keeper(run: Mapping[str, Any], node: Node, before: Sequence[Node]) -> None:
    """Where a node's keeper listens, and what its session runs then in the place of torchrun."""
    shared = sum(other["address"] == node["address"] for other in before)
    node["keeper_port"] = keeper_ports(run, shared + 1)[shared]
    # Any host may become the master; nodes of one machine share the rendezvous port, which the first of them tries.
    node["open_ports"] = [*([] if shared else [run["ddp_port"]]), node["keeper_port"]]
    node["session_argv"] = [node["argv"][0], "-B", os.path.join(node["run_dir"], ".keeper", "keeper.py")]


def trainer_flags(
    run: Mapping[str, Any], choice: Choice, run_dir: str, training: Mapping[str, Any], base_step: int | None = None
) -> list[str]:
    """The trainer's own flags; somebody else's trainer gets none but those of nanochat."""
    flags = flags_of_all(run, choice)
    if not choice.ours:
        return [*(f"--{name}={value}" for name, value in flags.items()), *run["ddp_extra_args"]]
    own: dict[str, object] = {
        "sync": run["ddp_sync"],
        "head": training["head"],
        "local-steps": run["ddp_local_steps"],
        "local-overlap": local_overlap(run["ddp_local_steps"]),
        "matmul": choice.matmul,
        "run-dir": run_dir,
        "timeout-seconds": run["ddp_timeout"],
        "keep-checkpoints": run["ddp_keep_checkpoints"],
        "tracker": run["ddp_tracker"],
        **stages.flags(run, run_dir, base_step),
    }
    if minutes := save_minutes(run, choice):
        own["save-minutes"] = minutes
    if run["ddp_tracker"] == "mlflow":
        own["tracker-uri"] = tracker_uri(run)
    if len(set(training["rows"])) > 1:
        own["rank-rows"] = ",".join(str(rows) for rows in training["rows"])
    if training.get("head_shares"):
        own["head-shares"] = ",".join(str(part) for part in training["head_shares"])
    words = [f"--{name}={value}" for name, value in {**flags, **own}.items()]
    if run["ddp_restarts"]:
        words.append("--save-on-loss")
    if training.get("rebalance"):
        words.append("--rebalance")
    return [*words, *(["--resume"] if run["ddp_resume"] else []), *run["ddp_extra_args"]]


def flags_of_all(run: Mapping[str, Any], choice: Choice) -> dict[str, object]:
    """Those that nanochat's own scripts have."""
    named = choice.ours or run["ddp_tracker"] == "wandb"
    flags: dict[str, object] = {
        "run": choice.name if named else "dummy",
        # A checkout's later scripts read and write under the name of the base model.
        "model-tag": choice.name if choice.ours else stages.base_name(run),
        "device-type": choice.device,
        "depth": run["ddp_depth"],
        "aspect-ratio": run["ddp_aspect_ratio"],
        "head-dim": run["ddp_head_dim"],
        "max-seq-len": run["ddp_sequence"],
        "window-pattern": run["ddp_window_pattern"].upper(),
        "num-iterations": run["ddp_iterations"],
        "device-batch-size": run["ddp_device_batch"],
        "total-batch-size": run["ddp_total_batch"],
        "eval-every": run["ddp_eval_every"],
        "eval-tokens": run["ddp_eval_tokens"],
        "core-metric-every": -1,
        "sample-every": run["ddp_sample_every"],
        "save-every": run["ddp_save_every"],
    }
    if not choice.ours and choice.stage != BASE:
        # They have shape and schedule from the checkpoint, and save at their end.
        flags = {name: value for name, value in flags.items() if name in LATER_FLAGS} | UNMEASURED.get(choice.stage, {})
    return flags


def flag_names(run: Mapping[str, Any], choice: Choice) -> list[str]:
    """The names of the flags that the plan itself gives to the trainer."""
    words = trainer_flags(
        # Not decided yet where it is auto, and no flag's name depends on it.
        {**run, "ddp_extra_args": [], "ddp_local_steps": 0},
        choice,
        "",
        {"rows": [1, 2], "head": "whole", "rebalance": True},
    )
    return [word.split("=")[0] for word in words if word.startswith("--")]


def save_minutes(run: Mapping[str, Any], choice: Choice) -> int:
    """Minutes without a checkpoint after which one is due; 0 where steps alone say when."""
    return int(run["ddp_save_minutes"]) if choice.ours and not run["ddp_local_steps"] else 0


def env(run: Mapping[str, Any], choice: Choice, node: Node) -> dict[str, str]:
    """The same names on every host, so that no rank sees a setting that another does not."""
    names = {
        "NANOCHAT_BASE_DIR": node["run_dir"],
        "NANOCHAT_DATA_DIR": os.path.join(node["run_dir"], "data"),
        "NANOCHAT_DTYPE": node["dtype"],
        "NANOCHAT_FORCE_SDPA": "1",
        "OMP_NUM_THREADS": str(node["threads"]),
        "GLOO_SOCKET_IFNAME": node["nic"] or "",
        "NCCL_SOCKET_IFNAME": node["nic"] or "",
        "PYTHONPATH": node["trainer_dir"],
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_FR_BUFFER_SIZE": FLIGHT_RECORD_ENTRIES,
        "GLIBC_TUNABLES": MALLOC,
        "GOMP_SPINCOUNT": SPINS,
    }
    if node["cores"]:
        names["NANOCHAT_CORES"] = ",".join(str(number) for number in node["cores"])
    if choice.device == "cpu":
        # A GPU in the box must not decide anything about a run on the CPU.
        names["CUDA_VISIBLE_DEVICES"] = ""
        if not choice.ours:
            # nanochat's own compiles the model, which takes a C++ compiler on every host and minutes before the first step. To
            # switch compiling off would not do: where a whole function is to be compiled, that is an error.
            names["TORCH_COMPILE_OVERRIDE_BACKENDS"] = ">=0:eager"
    if run["ddp_tracker"] == "mlflow":
        names["MLFLOW_EXPERIMENT_NAME"] = f"nanochat-d{run['ddp_depth']}"
    names.update(run["ddp_extra_env"])
    return dict(sorted(names.items()))
