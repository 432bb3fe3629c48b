# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Predicts a step's time on given hosts and link for each ddp_sync method, and chooses for `auto`. Pure functions.

The figures are estimates from a simple model: a rank computes its rows, gradients are sent partly meanwhile,
and the step ends when the slowest rank and the slowest link are done.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Model
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import AUTO
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import head_work
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.schedule import steps_apart
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.ways import (
    WAYS,
    can_share,
    choose_head,
    fits,
    most_bytes,
)

FLOAT = 4
WIRE_SHARE = 0.98  # Gloo's fraction of TCP's rate
# Dependent exchanges per step without overlapping computation; from the delays of bench/two_nodes.py.
ROUNDS = 8
MEETINGS_COUNTED = 1000  # of a run, to tell for how many of them all wait
# Gloo's copying takes cores from computing, so this fraction of the wire time is felt even if hidden.
FELT_SHARE = 0.15
# Fraction of the computing that can hide transfers: the head's gradient is sent early, ddp's buckets late. Both
# measured by bench/two_nodes.py, see lab/performance.md.
HIDDEN_SHARE, DDP_HIDDEN_SHARE = 0.57, 0.25


class Speed(NamedTuple):
    """A host's measured step: seconds of a pass of device_batch rows, of AdamW and of Muon; a shorter pass takes less."""

    host: str
    pass_seconds: float
    adamw_seconds: float
    muon_seconds: float

    def compute(self, passes: float) -> float:
        return self.pass_seconds * passes

    def optimizer(self, share: float) -> float:
        """Optimizer seconds with this fraction of Muon's matrices."""
        return self.adamw_seconds + self.muon_seconds * share

    def alone(self, passes: float) -> float:
        return self.compute(passes) + self.optimizer(1.0)


class Link(NamedTuple):
    """The slowest direction between any two hosts."""

    mbit: float
    latency_ms: float


class Step(NamedTuple):
    """A predicted step."""

    seconds: float
    tokens_per_second: float
    wait_seconds: Dict[str, float]
    bytes_sent: int


@dataclasses.dataclass(frozen=True)
class Job:
    """The part of a plan that determines a step's time."""

    hosts: Tuple[str, ...]  # by rank, as the rows
    rows: Tuple[int, ...]
    model: Model
    device: str
    total_batch: int
    device_batch: int
    iterations: int
    sync_open: bool  # whether the plan chooses ddp_sync
    local_open: bool
    every: Tuple[int, ...]  # steps between evaluations, samples and saves, which need all ranks in sync
    sync: str = "exact"
    local_steps: int = 0
    head: str = "whole"
    head_open: bool = False  # whether another ddp_sync may have another head
    head_shares: Tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def apart(self) -> int:
        """Number of local steps."""
        return self.local_steps if self.world > 1 else 0

    def with_way(self, sync: str, local_steps: int, head: str) -> Job:
        """The same job with another sync method; head is whole, shared, or auto for fewer bytes."""
        chosen = _choose_head(self, sync, head)
        return dataclasses.replace(self, sync=sync, local_steps=local_steps, head=chosen, head_open=head == AUTO)


EVERY = ("eval_every", "sample_every", "save_every")


def job_of(plan: Mapping[str, Any]) -> Job:
    """The job of a plan document, which may be from an older version with fewer fields."""
    training, nodes = plan["training"], plan["nodes"]
    asked = {
        name: (training.get("asked") or {}).get(name, training.get(name)) for name in ("sync", "head", "local_steps")
    }
    return Job(
        hosts=tuple(node["host"] for node in nodes),
        rows=tuple(node.get("rows") or 0 for node in nodes),
        model=plan["model"],
        device=str(nodes[0].get("device", "cpu")),
        total_batch=training["total_batch"],
        device_batch=training["device_batch"],
        iterations=training.get("iterations") or 1,
        sync=training.get("sync") or "exact",
        sync_open=asked["sync"] == AUTO,
        local_steps=int(training.get("local_steps") or 0),
        local_open=asked["local_steps"] == AUTO,
        head=str(training.get("head") or "whole"),
        head_open=bool(training.get("head_open", asked["head"] == AUTO)),
        every=tuple(int(training.get(name) or 0) for name in EVERY),
        head_shares=tuple(training.get("head_shares") or ()),
    )


@functools.lru_cache(maxsize=None)
def touched_rows(vocab_size: int, tokens: int) -> int:
    """Expected number of distinct tokens in a text with Zipf-like frequencies."""
    weights = [1.0 / (rank + 2.7) for rank in range(vocab_size)]
    total = sum(weights)
    return round(sum(1.0 - (1.0 - weight / total) ** tokens for weight in weights))


def most_matrices(job: Job) -> float:
    """The share of the layers' matrices that one rank has at most. The largest, a third of a layer's, is never divided, so
    that among many ranks its owner takes and sends more than the others."""
    return max(1 / max(1, job.world), 1 / (3 * max(1, job.model["depth"])))


def muon_share(job: Job, sync: Optional[str] = None, local: Optional[int] = None) -> float:
    """The largest fraction of Muon's matrices that one rank updates per step."""
    kind, apart = sync or job.sync, job.apart if local is None else local
    return most_matrices(job) if kind in WAYS and not apart else 1.0


def bytes_sent(job: Job, sync: Optional[str] = None, local: Optional[int] = None) -> int:
    """Bytes that the rank which sends most sends in a step: of the embeddings its own tokens' rows to every other rank, of
    the layers' matrices gradients to their owners and its own updates to all, of all else what a ring sends, which passes
    every byte almost twice, and between two ranks once. After local steps it is the weights that travel, with the rows of
    all tokens since the last time."""
    model, world = job.model, job.world
    kind = sync or job.sync
    counts = model["parameters"]
    ring = 2 * (world - 1) / max(1, world)
    if kind not in WAYS:
        return int(FLOAT * counts["total"] * ring)
    tables = (counts["wte"] + counts["value_embeds"]) // max(1, counts["wte"])
    meets = job.apart if local is None else local
    apart = max(1, meets)
    rows = touched_rows(model["vocab_size"], apart * job.total_batch // max(1, world))
    dense = counts["lm_head"] + counts["scalars"]
    most = 1 / max(1, world) if meets else most_matrices(job)
    matrices = counts["transformer_matrices"] * (1 - most + (world - 1) * most)
    way = WAYS[kind]
    of_row = way.meeting_bytes if meets else way.row_bytes
    shared = 0
    if not meets and head_of(job, kind) == "shared":
        dense -= counts["lm_head"]
        tokens = [rows * model["sequence"] for rows in job.rows]
        shared = most_bytes(tokens, model["n_embd"], way.hidden_bytes)
    return shared + int(
        ((dense * ring + matrices) * way.value_bytes + rows * model["n_embd"] * tables * (world - 1) * of_row) / apart
    )


def head_of(job: Job, kind: str) -> str:
    """The head with this sync method: if the plan chooses, it depends on the bytes."""
    fixed = kind == job.sync or not job.head_open or job.world < 2
    return job.head if fixed else _choose_head(job, kind, AUTO)


def _choose_head(job: Job, kind: str, wanted: str) -> str:
    width = job.model["n_embd"]
    tokens = [rows * job.model["sequence"] for rows in job.rows]
    vocabulary = job.model["parameters"]["lm_head"] // width
    return choose_head(wanted, can_share(job.device, kind), vocabulary, width, tokens, kind)


def local_overlap(apart: int) -> int:
    """Steps during which a meeting's mean is sent, for this many local steps."""
    return apart // 2


def waited_share(job: Job, apart: int) -> float:
    """The fraction of blocking meetings, because a checkpoint, evaluation or sample needs all ranks in sync."""
    # The trainer moves them to the next meeting.
    every = [-(-steps // apart) for steps in job.every if steps > 0]
    meetings = range(1, min(max(1, job.iterations // apart), MEETINGS_COUNTED) + 1)
    return sum(any(number % one == 0 for one in every) for number in meetings) / len(meetings)


def passes_of(job: Job, rows: Sequence[int]) -> List[float]:
    """Each rank's work in passes of device_batch rows; parts of the head are finer than rows."""
    passes = [share / job.device_batch for share in rows]
    parts = job.head_shares
    if not parts or tuple(rows) != job.rows:
        return passes
    of_head = head_work(job.model)
    return [(1 - of_head) * own + of_head * sum(passes) * part / sum(parts) for own, part in zip(passes, parts)]


def predict(
    job: Job,
    speeds: Sequence[Speed],
    link: Optional[Link],
    rows: Sequence[int],
    sync: Optional[str] = None,
    local: Optional[int] = None,
) -> Step:
    """A step of all hosts, with rows in the order of the speeds; for local steps, their mean."""
    kind = sync or job.sync
    apart = job.apart if local is None else local
    computing = [speed.compute(count) for speed, count in zip(speeds, passes_of(job, rows))]
    sent = bytes_sent(job, kind, apart)
    joined = link if job.world > 1 else None
    late = ROUNDS * joined.latency_ms / 1000 / max(1, apart) if joined else 0.0
    wire = sent * 8 / (joined.mbit * WIRE_SHARE * 1e6) if joined else 0.0
    slowest = max(computing)
    updates = [speed.optimizer(muon_share(job, kind, apart)) for speed in speeds]
    behind, waited = hiding(kind, job, apart)
    hidden = behind * (slowest + max(updates))
    felt = waited * wire + (1 - waited) * max(FELT_SHARE * wire, wire - hidden)
    seconds = slowest + felt + late + max(updates)
    waits = {speed.host: round(seconds - own - update, 4) for speed, own, update in zip(speeds, computing, updates)}
    return Step(seconds, job.total_batch / seconds, waits, sent)


def hiding(kind: str, job: Job, apart: int) -> Tuple[float, float]:
    """(fraction of the computing that can hide transfers, fraction of the bytes that cannot be hidden)."""
    if apart:
        return local_overlap(apart) / apart, waited_share(job, apart)
    if kind == "ddp":
        return DDP_HIDDEN_SHARE, 0.0
    return (HIDDEN_SHARE, 0.0) if kind in WAYS else (0.0, 1.0)


def steps_together(steps: int) -> int:
    """Lockstep steps of a run with local steps, at its start and end, as in the trainer's schedule.py."""
    return steps - len(steps_apart(steps))


def mean_step(
    job: Job,
    speeds: Sequence[Speed],
    link: Optional[Link],
    rows: Sequence[int],
    sync: Optional[str] = None,
    local: Optional[int] = None,
) -> Step:
    """The mean step of a whole run, including both local and lockstep ones."""
    apart = (job.local_steps if local is None else local) if job.world > 1 else 0
    together = predict(job, speeds, link, rows, sync, 0)
    if not apart:
        return together
    steps = max(1, job.iterations)
    share = steps_together(steps) / steps
    alone = predict(job, speeds, link, rows, sync, apart)

    def mean(one: float, other: float) -> float:
        return share * one + (1 - share) * other

    seconds = mean(together.seconds, alone.seconds)
    waits = {host: round(mean(wait, alone.wait_seconds[host]), 4) for host, wait in together.wait_seconds.items()}
    sent = int(mean(together.bytes_sent, alone.bytes_sent))
    return Step(seconds, job.total_batch / seconds, waits, sent)


def speeds_of(hosts: Sequence[str], measured: Mapping[str, Any]) -> List[Speed]:
    """The measured steps in the order of these hosts; empty if one is missing."""
    found = [(host, measured.get(host) or {}) for host in hosts]
    if not all("pass_seconds" in one for dummy, one in found):
        return []
    return [Speed(host, one["pass_seconds"], one["adamw_seconds"], one["muon_seconds"]) for host, one in found]


# The choice of auto

# A more precise method is chosen if it reaches this fraction of the fastest one's speed.
NEARLY_AS_FAST = 0.95


def eligible(job: Job) -> List[str]:
    """The methods that auto may choose for this model."""
    return [kind for kind in WAYS if fits(kind, job.model["n_embd"])]


def choose_sync(job: Job, speeds: Sequence[Speed], link: Link, rows: Sequence[int], local: Optional[int] = None) -> str:
    """The most precise method that is nearly as fast as the fastest: exact if the link hides all transfers."""
    steps = {kind: mean_step(job, speeds, link, rows, kind, local).seconds for kind in eligible(job)}
    fastest = min(steps.values())
    return next(kind for kind, seconds in steps.items() if NEARLY_AS_FAST * seconds <= fastest)


def links_of(measured: Sequence[Mapping[str, Any]]) -> Optional[Link]:
    """The slowest link measured by each host; None unless every host measured."""
    found = [one.get("link") for one in measured]
    links = [one for one in found if isinstance(one, dict) and one.get("mbit")]
    if not links or len(links) < len(measured):
        return None
    return Link(min(float(one["mbit"]) for one in links), max(float(one.get("latency_ms") or 0.0) for one in links))


def subject(model: Mapping[str, Any], device_batch: int) -> str:
    """The key that ties a measured step to this model."""
    return digest_of([model, device_batch])
