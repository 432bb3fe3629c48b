# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Predicts a step's time on given hosts and link for each ddp_sync method, and chooses for `auto`. Pure functions.

The figures are estimates from a simple model: a rank computes its rows in passes, gradients are sent partly during the last of them
and the optimizer, and the step ends when the slowest rank and the slowest link are done.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .._contract.plan import Model, Plan
from .._contract.probe import Measured
from .._contract.settings_table import AUTO
from .._rules.model_size import LAYER_MATRICES
from .._rules.ways import WAYS, choose_head, fits, most_bytes

FLOAT = 4
WIRE_SHARE = 0.98  # Gloo's fraction of TCP's rate
# Dependent exchanges per step without overlapping computation; from the delays of bench/two_nodes.py.
ROUNDS = 8
# Among computing that fills its cores a host needs this many times as long for a message as without; from five runs of the demo, whose
# small steps show it.
MESSAGE_COST = 10
HEAD_BLOCK_BYTES = 2**22  # of the head's gradient, sent apart (nanochat/model/gradients.py)
# Gloo's copying takes cores from computing, so this fraction of the wire time is felt even if hidden.
FELT_SHARE = 0.15
# Fraction of the computing that can hide transfers: the head's gradient is sent early. Measured by bench/two_nodes.py, see
# lab/performance.md.
HIDDEN_SHARE = 0.57


class Speed(NamedTuple):
    """A host's measured step: seconds of a pass of device_batch rows, of AdamW and of Muon; a shorter pass takes less. Half of Muon's
    small matrices take more than half of its time."""

    host: str
    pass_seconds: float
    adamw_seconds: float
    muon_seconds: float
    muon_half_seconds: float = 0.0  # 0: not measured

    def optimizer(self, share: float) -> float:
        """Optimizer seconds with this fraction of Muon's matrices."""
        half = max(self.muon_half_seconds, self.muon_seconds / 2)
        return self.adamw_seconds + self.muon_seconds - 2 * (1 - share) * (self.muon_seconds - half)

    def alone(self, passes: float) -> float:
        return self.pass_seconds * passes + self.optimizer(1.0)


class Link(NamedTuple):
    """The slowest direction between any two hosts."""

    mbit: float
    latency_ms: float
    message_ms: float = 0.0  # of both ends' time, however short the message; 0: not measured


class PredictedStep(NamedTuple):
    """A predicted step."""

    seconds: float
    tokens_per_second: float
    wait_seconds: Dict[str, float]
    bytes_sent: int


@dataclasses.dataclass(frozen=True)
class StepJob:
    """The part of a plan that determines a step's time."""

    hosts: Tuple[str, ...]  # by rank, as the rows
    rows: Tuple[int, ...]
    model: Model
    total_batch: int
    device_batch: int
    sync_open: bool  # whether the plan chooses ddp_sync
    sync: str = "exact"
    head: str = "whole"
    head_open: bool = False  # whether another ddp_sync may have another head
    head_shares: Tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return len(self.hosts)

    def with_sync(self, sync: str, head: str) -> StepJob:
        """The same job with another sync method; head is whole, shared, or auto for fewer bytes."""
        width, vocabulary = self.model["n_embd"], self.model["parameters"]["lm_head"] // self.model["n_embd"]
        tokens = [rows * self.model["sequence"] for rows in self.rows]
        chosen = choose_head(head, vocabulary, width, tokens, sync)
        return dataclasses.replace(self, sync=sync, head=chosen, head_open=head == AUTO)

    def under(self, sync: str) -> StepJob:
        """The same with another method, and with the head that goes with that: if the plan chooses, it depends on the bytes."""
        is_fixed = sync == self.sync or not self.head_open or self.world < 2
        return dataclasses.replace(self, sync=sync) if is_fixed else self.with_sync(sync, AUTO)


def job_of(plan: Plan) -> StepJob:
    """The job of a plan."""
    training, nodes = plan["training"], plan["nodes"]
    return StepJob(
        hosts=tuple(node["host"] for node in nodes),
        rows=tuple(node["rows"] for node in nodes),
        model=plan["model"],
        total_batch=training["total_batch"],
        device_batch=training["device_batch"],
        sync=training["sync"],
        sync_open=training["asked"]["sync"] == AUTO,
        head=training["head"],
        head_open=training["head_open"],
        head_shares=tuple(training.get("head_shares", ())),
    )


@functools.cache
def touched_rows(vocab_size: int, tokens: int) -> int:
    """Expected number of distinct tokens in a text with Zipf-like frequencies."""
    weights = [1.0 / (rank + 2.7) for rank in range(vocab_size)]
    total = sum(weights)
    return round(sum(1.0 - (1.0 - weight / total) ** tokens for weight in weights))


def largest_matrix_share(job: StepJob) -> float:
    """The largest share of the layers' matrices that one rank owns. No matrix is divided, so among many ranks the owner of the
    largest updates and sends more than the others."""
    return max(1 / max(1, job.world), max(LAYER_MATRICES) / sum(LAYER_MATRICES) / max(1, job.model["depth"]))


def bytes_sent(job: StepJob) -> Tuple[int, int]:
    """(gradients and updates once a step, hidden states of a shared head in all passes): the bytes of the rank that sends most.

    A rank sends the embedding rows of its own tokens to every other rank, gradients of the layers' matrices to their owners, and
    updates of its own matrices to all. A ring carries everything else: almost every byte twice, and between two ranks once.
    """
    model, world = job.model, job.world
    counts = model["parameters"]
    ring = 2 * (world - 1) / max(1, world)
    tables = (counts["wte"] + counts["value_embeds"]) // max(1, counts["wte"])
    rows = touched_rows(model["vocab_size"], job.total_batch // max(1, world))
    dense = counts["lm_head"] + counts["scalars"]
    most = largest_matrix_share(job)
    matrices = counts["transformer_matrices"] * (1 - most + (world - 1) * most)
    way = WAYS[job.sync]
    shared = 0
    if job.head == "shared":
        dense -= counts["lm_head"]
        tokens = [rows * model["sequence"] for rows in job.rows]
        shared = most_bytes(tokens, model["n_embd"], way.hidden_bytes)
    embeddings = rows * model["n_embd"] * tables * (world - 1)
    return int((dense * ring + matrices) * way.value_bytes + embeddings * way.row_bytes), shared


def messages_sent(job: StepJob) -> float:
    """The number of messages behind `bytes_sent`: the matrices of each layer, and a gate in every other one."""
    world, depth, most = job.world, job.model["depth"], largest_matrix_share(job)
    counts = job.model["parameters"]
    tables = (counts["wte"] + counts["value_embeds"]) // max(1, counts["wte"])
    matrices = (len(LAYER_MATRICES) * depth + tables - 1) * (1 - most + (world - 1) * most)
    blocks = -(-counts["lm_head"] * FLOAT // HEAD_BLOCK_BYTES) * (1 if world < 3 else 2)
    # With the ids of the tokens, and the small gradients with the loss.
    return matrices + (tables + blocks + 2) * (world - 1)


def predict(job: StepJob, speeds: Sequence[Speed], link: Optional[Link]) -> PredictedStep:
    """A step of all hosts; speeds in their order."""
    work = [rows / job.device_batch for rows in job.rows]
    if job.head_shares:
        # The head's fraction of the work. Its parts are finer than rows.
        of_head, parts = 6 * job.model["parameters"]["lm_head"] / job.model["flops_per_token"], job.head_shares
        work = [(1 - of_head) * own + of_head * sum(work) * part / sum(parts) for own, part in zip(work, parts)]
    computing = [speed.pass_seconds * count for speed, count in zip(speeds, work)]
    slowest, waiting, late = max(computing), 0.0, 0.0
    gradients, hidden = bytes_sent(job)
    updates = [speed.optimizer(largest_matrix_share(job)) for speed in speeds]
    if link is not None and job.world > 1:
        # The rank with most rows is the last to begin its last pass.
        passes = max(1, math.ceil(max(job.rows) / job.device_batch))
        of_pass, head = slowest / passes, hidden / passes
        waiting = (passes - 1) * unhidden_seconds(link, head, of_pass)
        waiting += unhidden_seconds(link, gradients + head, of_pass + max(updates))
        late = (ROUNDS * link.latency_ms + messages_sent(job) * MESSAGE_COST * link.message_ms) / 1000
    seconds = slowest + waiting + late + max(updates)
    waits = {speed.host: round(seconds - own - update, 4) for speed, own, update in zip(speeds, computing, updates)}
    return PredictedStep(seconds, job.total_batch / seconds, waits, gradients + hidden)


def unhidden_seconds(link: Link, sent: float, computing: float) -> float:
    """The seconds of a transfer that are not hidden behind these seconds of computing."""
    wire = sent * 8 / (link.mbit * WIRE_SHARE * 1e6)
    return max(FELT_SHARE * wire, wire - HIDDEN_SHARE * computing)


def speeds_of(hosts: Sequence[str], measured: Mapping[str, Measured]) -> List[Speed]:
    """The measured steps in the order of these hosts; empty if one is missing."""
    found: List[Tuple[str, Measured]] = [(host, measured.get(host) or {}) for host in hosts]
    if not all("pass_seconds" in one for dummy, one in found):
        return []
    return [
        Speed(
            host,
            one["pass_seconds"],
            one.get("adamw_seconds", 0.0),
            one.get("muon_seconds", 0.0),
            one.get("muon_half_seconds", 0.0),
        )
        for host, one in found
    ]


# The choice of auto

# A more precise method is chosen if it reaches this fraction of the fastest one's speed.
NEARLY_AS_FAST = 0.95


def choose_sync(job: StepJob, speeds: Sequence[Speed], link: Optional[Link]) -> Optional[str]:
    """The most precise method for this model that is nearly as fast as the fastest: exact if the link hides all transfers. None if
    there is nothing to choose, or the link is unknown."""
    if job.world < 2 or link is None or not job.sync_open:
        return None
    steps = {kind: predict(job.under(kind), speeds, link).seconds for kind in WAYS if fits(kind, job.model["n_embd"])}
    fastest = min(steps.values())
    return next(kind for kind, seconds in steps.items() if NEARLY_AS_FAST * seconds <= fastest)


def links_of(measured: Sequence[Measured]) -> Optional[Link]:
    """The slowest link measured by each host; None unless every host measured."""
    links = [one["link"] for one in measured if one.get("link") and one["link"].get("mbit")]
    if not links or len(links) < len(measured):
        return None
    worst = (max(one.get(name, 0.0) for one in links) for name in ("latency_ms", "message_ms"))
    return Link(min(one["mbit"] for one in links), *worst)


# The precision of matrix products if the rehearsal chooses, which times a step with each

# A CPU with bf16 instructions may be slower with them.
PRECISIONS = ("fp32", "bf16")
# Another precision must be faster by this fraction; measurements are no more exact.
CLEARLY = 1.05


def with_precision(measured: Measured, matmul: str) -> Measured:
    """A host's measurements with only this precision; empty if it measured only others."""
    if measured.get("matmul", matmul) == matmul:
        return measured
    found = (measured.get("products") or {}).get(matmul)
    return {**measured, **found} if found else {}


def speeds_together(measured: Sequence[Measured]) -> Dict[str, float]:
    """Combined tokens per second of all hosts, for each precision that every host tried."""
    tried = [one.get("products") or {} for one in measured]
    speeds = {matmul: [one.get(matmul, {}).get("tokens_per_second") or 0.0 for one in tried] for matmul in PRECISIONS}
    return {matmul: sum(of_all) for matmul, of_all in speeds.items() if of_all and all(of_all)}


def fastest_precision(speeds: Mapping[str, float]) -> str:
    """A less exact one only if it is clearly faster."""
    return "bf16" if speeds.get("bf16", 0.0) > CLEARLY * speeds.get("fp32", float("inf")) else "fp32"
