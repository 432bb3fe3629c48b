# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the plan: a pure function from settings, probes and measurements to the document that every later step reads.

make_plan reads the settings (Asked), decides what they leave open (Decided), and builds the document from both. Only settings and
lasting facts of the hosts matter, not free memory, clocks or load, so the same job has the same digest tomorrow.
"""

from __future__ import annotations

import os
from typing import Mapping, NamedTuple, Optional, Sequence, cast

from .._contract.command_line import rank_argv, rank_environ
from .._contract.decode import Ports
from .._contract.document import digest_of, section
from .._contract.findings import Finding, PlanError, finding
from .._contract.findings_table import ERROR
from .._contract.lineage import Launched
from .._contract.plan import Given, Here, Node, Plan, Training
from .._contract.politeness import GUEST
from .._contract.probe import Measured
from .._contract.settings import Asked, resolve
from .._contract.validate import HIGHEST_PORT, LOWEST_PORT
from . import budget, command, data_set, host_checks, model_memory, settings_checks, stages, trainings
from .decided import Decided, cores_of, decide, decide_matmul, decide_restarts, threads_of
from .hosts import Endpoint, EndpointChooser, Host, choose_python, home_expanded, ranks
from .step_model import with_precision

SHARD_BYTES = {"url": 100_000_000, "host": 100_000_000, "controller": 100_000_000, "text": 25_000_000}


class PlanOutcome(NamedTuple):
    """The document, and what the controller makes of it."""

    plan: Plan
    findings: list[Finding]
    training: Launched
    budget: Optional[budget.ModelChoice]
    text_bytes: Optional[int]  # the size of the text to train on, if that is known


def read(hosts: Sequence[Given]) -> Asked:
    """The job's settings; rejects invalid ones."""
    return resolve([(host["name"], host["settings"]) for host in hosts])


def questions(hosts: Sequence[Given]) -> dict[str, dict[str, object]]:
    """host_info options for each host: {host: options}. Rejects invalid settings before any host is contacted.

    Hosts have the form {name, settings, reach}; reach is how others would address the host, None for this machine.
    """
    asked = read(hosts)
    run, each = asked.run, asked.hosts
    order = ranks([Host(host["name"], each[host["name"]], {}) for host in hosts])[0]
    having = run.data_host or min(each, key=lambda name: order.get(name, len(each)))
    folders = [*run.data_paths] if run.data_source in data_set.ON_A_HOST else []
    addresses = {host["name"]: each[host["name"]].address or host.get("reach") for host in hosts}
    ports = [run.port, *(command.keeper_ports(run, len(each)) if decide_restarts(asked) else [])]
    return {
        name: {
            "base_dir": own.base_dir,
            "run_dir": os.path.join(own.base_dir, "runs", stages.run_name(run)),
            "base_run": stages.base_name(run) if run.stage != stages.BASE else None,
            "venv_dir": own.venv_dir,
            "python": own.python,
            "ports": ports,
            "folders": folders if name == having else [],
            "peers": [address for other, address in addresses.items() if address and other != name],
        }
        for name, own in each.items()
    }


def make_plan(
    hosts: Sequence[Given],
    tolerant: bool = False,
    here: Here | None = None,
    measured: Mapping[str, Measured] | None = None,
    now: float = 0.0,
    began: float = 0.0,
) -> PlanOutcome:
    """The plan for hosts of the form {name, settings, probe, error}, in the inventory's order; error says why a probe is missing,
    here is what the settings name on the controller, and measured what a rehearsal of this job has just measured on
    each host (without it, the last measurement that the host kept counts).

    With `tolerant`, obstacles to a start are only findings, and a host may lack its probe: enough to see a
    run and to stop it. Now and when this play began only count for a run that has a time to end at. Raises PlanError with all
    problems at once.
    """
    asked, here, measured = read(hosts), here or {}, measured or {}
    known = []
    for host in hosts:
        name, probe = host["name"], host.get("probe") or {}
        found = measured[name] if name in measured else cast(Measured, section(probe, "measured"))
        kept = {} if asked.run.fresh else section(probe, "run")
        error, reach, login = host.get("error") or "", host.get("reach"), host.get("login") or ""
        known.append(Host(name, asked.hosts[name], probe, error, reach, found, kept, login))
    order, of_ranks = ranks(known)
    known = sorted(known, key=lambda host: order.get(host.name, len(hosts)))
    held, held_of_base = trainings.held_by(known, "run"), trainings.held_by(known, "base_run")
    training, base = next(iter(held), None), next(iter(held_of_base), None)
    matmul, tried = decide_matmul(asked, known)
    known = [host._replace(measured=with_precision(host.measured, matmul)) for host in known]
    since = training.begun if training and not asked.run.fresh else 0
    asked, choice, late = budget.fit_model(asked, known, since, now, began)
    run, decided = asked.run, decide(asked, known, matmul, tried)
    wrong = [*late, *settings_checks.problems(decided), *of_ranks, *decided.problems]
    problems = [finding("setting-refused", "", problem.rstrip(".")) for problem in wrong]
    chooser = EndpointChooser(known)
    plan = document(decided, chooser.endpoints(), here)
    findings = [
        *chooser.findings,
        *host_checks.check_hosts(known, plan),
        *data_set.obstacles(run, plan["data"], known, here),
        *here.get("obstacles", []),
        *stages.obstacles(run, known, plan),
        *([] if run.fresh else host_checks.lost_checkpoints(known, plan)),
        # Of trainings that are all set aside none needs to be chosen.
        *([] if run.fresh else trainings.differing(held, decided.name)),
        *trainings.differing(held_of_base, stages.base_name(run)),
    ]
    obstacles = [] if tolerant else [one for one in findings if one["severity"] == ERROR]
    if problems or obstacles:
        raise PlanError([*problems, *obstacles])
    findings.sort(key=lambda one: one["severity"] == ERROR)
    launched = trainings.launched(known, plan, training, base, run.fresh)
    if decided.timed:
        begun = launched["begun"] or round(began)
        # The trainer must be over early enough for the whole command to meet the deadline.
        ends = round(budget.deadline(run, begun) - budget.collect_seconds(run, plan["model"]))
        launched = {**launched, "begun": begun, "ends": ends}
    return PlanOutcome(plan, findings, launched, choice, data_set.text_bytes(run, known, plan))


# The document


def document(decided: Decided, endpoints: Mapping[str, Endpoint], here: Here) -> Plan:
    """The plan from settings and decisions."""
    run, hosts = decided.run, decided.hosts
    master = hosts[0]
    compiler = ["zig"] if run.kernels == "zig" else []
    tracker = [run.tracker] if run.tracker in ("mlflow", "wandb") else []
    plan: Plan = {
        "format": 1,
        "run": decided.name,
        "world": len(hosts),
        "master": {"host": master.name, "address": endpoints[master.name].address, "port": run.port},
        "data_ports": data_ports(hosts),
        "manage_firewall": run.manage_firewall,
        "timeout_seconds": run.timeout,
        "model": decided.model,
        "training": training_of(decided),
        "data": data_set.document(run, hosts, here),
        "trainer": {
            "script": stages.SCRIPTS[run.stage],
            "torch": run.torch.partition("+")[0],
            "index": "default" if run.torch.endswith("+cuda") else "auto",
            "python": "3.10",  # the oldest that PyTorch runs on; hosts list none that is older
            "packages": ["trainer", *compiler, *tracker],
            "offline": run.trainer_offline,
        },
        "nodes": [],
    }
    if section_of_stage := stages.document(run, here):
        plan["stage"] = section_of_stage
    if run.restarts:
        plan["keeper"] = {
            "restarts": run.restarts,
            "min_hosts": run.min_hosts or len(hosts),
            "grace_seconds": run.grace,
            "survive_reboot": run.survive_reboot,
        }
    for rank in range(len(hosts)):
        plan["nodes"].append(node_of(decided, rank, endpoints, plan))
    plan["digest"] = digest_of(plan)
    return plan


def data_ports(hosts: Sequence[Host]) -> Ports:
    """The ports on which Gloo listens on these hosts: their local ports.

    Each host opens only its own, so that no host affects what others open; and none below 1024.
    """
    ranges = [host.fact("ephemeral") or {"low": 32768, "high": 60999} for host in hosts]
    low = min(max(LOWEST_PORT, min(entry["low"], HIGHEST_PORT)) for entry in ranges)
    return {"low": low, "high": max(low, *(min(entry["high"], HIGHEST_PORT) for entry in ranges))}


def training_of(decided: Decided) -> Training:
    asked, run, model = decided.asked, decided.run, decided.model
    tokens = run.total_batch * run.iterations
    training: Training = {
        "profile": run.profile,
        "total_batch": run.total_batch,
        "device_batch": run.device_batch,
        "batch_split": run.batch_split,
        "rows": list(decided.rows),
        "iterations": run.iterations,
        "tokens": tokens,
        "tokens_per_parameter": round(tokens / model["parameters"]["total"], 4),
        "flops": tokens * model["flops_per_token"],
        "sync": run.sync,
        "head": run.head,
        "head_open": decided.head_open,
        "asked": {"sync": asked.sync, "head": asked.head},
        "matmul": run.matmul,
        "matmul_tried": list(decided.matmul_tried),
        "eval_every": run.eval_every,
        "eval_tokens": run.eval_tokens,
        "sample_every": run.sample_every,
        "save_every": run.save_every,
        "save_minutes": run.save_minutes,
        "keep_checkpoints": run.keep_checkpoints,
        "resume": run.resume,
        "tracker": run.tracker,
        "tracker_port": run.tracker_port,
    }
    if decided.timed:
        training["timed"] = str(run.finish_by or run.budget)
    if decided.head_shares:
        training["head_shares"] = list(decided.head_shares)
    return training


def node_of(decided: Decided, rank: int, endpoints: Mapping[str, Endpoint], plan: Plan) -> Node:
    """One host's share of the run; the plan has the nodes before it."""
    run, hosts, host = decided.run, decided.hosts, decided.hosts[rank]
    base = host.fact("base_dir") or home_expanded(host.settings.base_dir, host)
    own = endpoints[host.name]
    python, version = choose_python(host, hosts, base, run.trainer_offline)
    peers = {one.address for name, one in endpoints.items() if name != host.name} - {None, own.address}
    run_dir = os.path.join(base, "runs", decided.name)
    rows, parts = decided.rows[rank], len(hosts) if run.head == "shared" else 1
    node: Node = {
        "host": host.name,
        "rank": rank,
        "address": own.address,
        "nic": own.nic,
        "data_ports": data_ports([host]),
        "user": host.fact("host", "user"),
        "base_dir": base,
        "run_dir": run_dir,
        "data_dir": os.path.join(base, "data", plan["data"]["id"]),
        "trainer_dir": os.path.join(base, "trainer"),
        "venv_dir": home_expanded(host.settings.venv_dir or os.path.join(base, "venv"), host),
        "python": python,
        "python_version": version,
        "session": f"nanochat-{decided.name}-rank{rank}",
        "threads": threads_of(host, hosts),
        "cores": cores_of(host, hosts),
        "rows": rows,
        "head_share": decided.head_parts[rank],
        "accumulation": -(-rows // run.device_batch),
        "memory_bytes": model_memory.memory(decided.shape, run.device_batch, run.sync, parts),
        "disk_bytes": disk_bytes(decided),
        "checkpoint_bytes": model_memory.checkpoint_bytes(decided.shape, run.sync),
        "peers": sorted(peer for peer in peers if peer is not None),
        "flags": command.trainer_flags(decided, run_dir),
        "argv": [],
        "env": {},
        "env_secret": sorted(run.secret_env),
    }
    if host.polite == GUEST:
        node["guest"] = {"hours": host.settings.hours, "away_if": host.settings.away_if}
    node["env"] = command.env(decided, node, host)
    node["argv"] = rank_argv(plan, node)
    before = sum(other["address"] == own.address for other in plan["nodes"])
    port = command.keeper_ports(run, before + 1)[before]
    node["owner_ports"] = [run.port, port]
    if run.restarts:
        node["keeper_port"] = port
        # Any host may become the master; nodes of one machine share the rendezvous port, which the first of them tests.
        node["open_ports"] = [*([] if before else [run.port]), port]
        node["session_argv"] = [node["argv"][0], "-B", os.path.join(run_dir, ".keeper", "keeper.py")]
    else:
        node["env"] = dict(sorted({**node["env"], **rank_environ(plan, node)}.items()))
    return node


def disk_bytes(decided: Decided) -> int:
    """Checkpoints to keep plus the one being written, and the shards."""
    run = decided.run
    saves = 1 + (run.iterations // run.save_every if run.save_every > 0 else 0)
    if run.save_minutes:
        # The number of time-based checkpoints is unknown, but no more than these are kept.
        saves = max(saves, run.keep_checkpoints + 1)
    kept = saves if run.keep_checkpoints < 0 else min(saves, run.keep_checkpoints + 1)
    shards = run.data_shards * SHARD_BYTES[run.data_source]
    return kept * model_memory.checkpoint_bytes(decided.shape, run.sync) + shards
