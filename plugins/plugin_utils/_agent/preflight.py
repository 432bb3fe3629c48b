# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side of preflight: what a host tries and measures, according to the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...module_utils._contract.command_line import flag_words, rank_environ
from ...module_utils._contract.document import Document, digest_of, section
from ...module_utils._contract.plan import Node, Plan, open_ports
from ...module_utils._contract.probe import Processors
from ...module_utils._contract.run_folder import MEASURED
from ...module_utils._preflight.judge import peers_of
from ...module_utils._preflight.peer_check import LinkTry, Responder
from ...module_utils._preflight.predict import measured_step, program_answer, with_link
from .carrier import Call, decoded

# Flags that only one stage has.
OF_STAGES = ("base-checkpoints", "model-step", "conversations", "val-conversations")


def own_part(call: Call, plan: Plan) -> Node:
    """The host's part of the plan."""
    return next(node for node in plan["nodes"] if node["host"] == call.host)


def start_responder(call: Call, plan: Plan) -> dict[str, Any]:
    """Let the host answer its peers on the ports of the job."""
    node = own_part(call, plan)
    meeting, wanted = plan["master"]["port"], open_ports(plan, node)
    answer = call.ask(
        "start_responder",
        address=node["address"],
        rendezvous_port=meeting if meeting in wanted else 0,
        others=[port for port in wanted if port != meeting],
        **node["data_ports"],
        seconds=90 + 10 * min(plan["world"], 16),
    )
    return decoded(answer, {"responder": Responder}, call.host)


def peer_check(call: Call, plan: Plan, rates: bool) -> dict[str, Any]:
    """Try the connections from the host to those that answer, and name the peer of each."""
    node = own_part(call, plan)
    others = {one["host"]: call.variables["hostvars"][one["host"]] for one in plan["nodes"]}
    peers = peers_of(
        plan, {host: known.get("__preflight_answering") or {} for host, known in others.items()}, call.host
    )
    answer = call.ask(
        "peer_check",
        address=node["address"],
        peers=list(peers.values()),
        timeout=min(3.0, plan["timeout_seconds"] / 10),
        rates=rates,
    )
    told = decoded(answer, {"links": list[LinkTry]}, call.host)
    named = [{**link, "host": host} for host, link in zip(peers, told.get("links", []), strict=False)]
    return told if told.get("failed") else {**told, "links": named}


def start_all_reduce(call: Call, plan: Plan) -> dict[str, Any]:
    """Start the host's rank of an all-reduce; `seconds`: how long it may take."""
    node = own_part(call, plan)
    # A slow or busy host may take minutes to import PyTorch.
    wait, start = min(20.0, plan["timeout_seconds"] / 3), min(120, plan["timeout_seconds"])
    seconds = int(wait * 6) + start + 60
    argv = ["timeout", str(seconds), node["argv"][0], "-m", "scripts.gloo_check", "--timeout", str(wait)]
    environ = {
        **node["env"],
        **rank_environ(plan, node),
        "PYTHONPATH": node["trainer_dir"],
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "NANOCHAT_START_SECONDS": str(start),
    }
    return {
        **call.ask("start_program", argv=argv, folder=node["trainer_dir"], environ=environ),
        "seconds": seconds + 10,
    }


def measure_step(call: Call, plan: Plan, seconds: float) -> dict[str, Any]:
    """Time some steps with each matmul precision that the plan may choose, unless the host has kept that of just such steps.

    `measured` is empty where that failed, and `error` says why.
    """
    node = own_part(call, plan)
    training, probe = plan["training"], call.variables.get("ddp_probe") or {}
    tried, cpu = training["matmul_tried"], section(probe, "cpu").get("model")
    where = [plan["trainer"]["torch"], node["cores"] or node["threads"], cpu]
    key = digest_of([plan["model"], training["device_batch"], tried, *where])
    kept = section(probe, "measured")
    if kept.get("key") == key:
        return {"measured": kept, "error": "", "is_new": False}
    # A few, and of a short run a tenth of its own.
    steps = min(5, max(1, training["iterations"] // (10 * len(tried))))
    flags = {name: value for name, value in node["flags"].items() if name not in OF_STAGES}
    words = ["--vocab-size", plan["model"]["vocab_size"], "--seconds", seconds, "--steps", steps]
    words += ["--products", *tried, "--", *flag_words(flags)]
    argv = [node["argv"][0], "-m", "scripts.measure_step", *map(str, words)]
    result = call.ask("run_program", argv=argv, folder=node["trainer_dir"], environ=node["env"])
    measured = measured_step(result, key)
    error = "" if measured else program_answer(result).get("error", "it gave no figures")
    return {"measured": measured, "error": error, "is_new": True}


def keep_measured(
    call: Call, plan: Plan, step: Mapping[str, Any], links: Mapping[str, list[LinkTry]], gloo: Document
) -> dict[str, Any]:
    """Add what was measured of the host's links to its step, and keep both on the host for the next plan."""
    node = own_part(call, plan)
    if not step.get("measured"):
        return {"measured": {}}
    measured = with_link(step["measured"], plan, links.get("links") or [], gloo)
    cpu: Processors = call.variables["ddp_probe"]["cpu"]
    # A figure from a busy host would mislead the next plan.
    if (cpu["load1"] or 0) < cpu["available"]:
        call.ask("keep_measured", path=os.path.join(node["base_dir"], MEASURED), measured=measured)
    # Measured rates always differ a little; only a newly measured step counts as a change.
    return {"changed": step["is_new"], "measured": measured}
