# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a step takes on given hosts over a given link with each way of ddp_sync, and which way `auto` takes. Pure functions.

The figures are estimates with a stated model: a rank computes its rows, the gradients travel partly while it still does,
and the step ends when the slowest rank and the slowest link are done.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import head
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.model_size import (
    LEAST_BLOCK,
    MEETING_ROW_BYTES,
    WIRE_BYTES,
    head_work,
    packs,
)

FLOAT = 4
WIRE_SHARE = 0.98  # what Gloo makes of the rate that TCP has
# The first tenth and the last twentieth of a run are never made apart, up to so many steps.
COMMON_FIRST, COMMON_LAST = 10, 20
MOST_FIRST, MOST_LAST = 100, 50
# Exchanges of a step that wait for each other, behind which nothing is computed; by the delays of bench/two_nodes.py.
ROUNDS = 8
MEETINGS_COUNTED = 1000  # of a run, to tell for how many of them all wait
# Gloo's copying takes cores from the computing, so of the time on the wire this share is felt even where it is hidden.
FELT_SHARE = 0.15
# Share of the computing behind which the wire can hide: the head's gradient leaves soon, the buckets of ddp late. Both by
# what bench/two_nodes.py measured, see lab/performance.md.
HIDDEN_SHARE, DDP_HIDDEN_SHARE = 0.57, 0.25


class Speed(NamedTuple):
    """One host's measured step: seconds of one pass of device_batch rows, of AdamW and of Muon; a shorter pass takes its part."""

    host: str
    pass_seconds: float
    adamw_seconds: float
    muon_seconds: float

    def compute(self, passes: float) -> float:
        return self.pass_seconds * passes

    def optimizer(self, share: float) -> float:
        """Of Muon's matrices a rank has its share."""
        return self.adamw_seconds + self.muon_seconds * share

    def alone(self, passes: float) -> float:
        return self.compute(passes) + self.optimizer(1.0)


class Link(NamedTuple):
    """The slowest direction between any two hosts."""

    mbit: float
    latency_ms: float


class Step(NamedTuple):
    """One step as it is expected."""

    seconds: float
    tokens_per_second: float
    wait_seconds: Dict[str, float]
    bytes_sent: int


@functools.lru_cache(maxsize=None)
def touched_rows(vocab_size: int, tokens: int) -> int:
    """Expected different tokens among so many of a text, whose frequencies fall like Zipf's."""
    weights = [1.0 / (rank + 2.7) for rank in range(vocab_size)]
    total = sum(weights)
    return round(sum(1.0 - (1.0 - weight / total) ** tokens for weight in weights))


def most_matrices(plan: Plan) -> float:
    """The share of the layers' matrices that one rank has at most. The largest, a third of a layer's, is never divided, so
    that among many ranks its owner takes and sends more than the others."""
    return max(1 / max(1, int(plan["world"])), 1 / (3 * max(1, int(plan["model"]["depth"]))))


def muon_share(plan: Plan, sync: Optional[str] = None, local: Optional[int] = None) -> float:
    """The share of Muon's matrices that the rank which updates most of them has in a step."""
    kind, apart = sync or plan["training"]["sync"], local_steps(plan) if local is None else local
    return most_matrices(plan) if kind in WIRE_BYTES and not apart else 1.0


def bytes_sent(plan: Plan, sync: Optional[str] = None, local: Optional[int] = None) -> int:
    """Bytes that the rank which sends most sends in a step: of the embeddings its own tokens' rows to every other rank, of
    the layers' matrices gradients to their owners and its own updates to all, of all else what a ring sends, which passes
    every byte almost twice, and between two ranks once. After local steps it is the weights that travel, with the rows of
    all tokens since the last time."""
    model, training, world = plan["model"], plan["training"], int(plan["world"])
    kind = sync or training["sync"]
    counts = model["parameters"]
    ring = 2 * (world - 1) / max(1, world)
    if kind not in WIRE_BYTES:
        return int(FLOAT * counts["total"] * ring)
    tables = (counts["wte"] + counts["value_embeds"]) // max(1, counts["wte"])
    meets = local_steps(plan) if local is None else local
    apart = max(1, meets)
    rows = touched_rows(model["vocab_size"], apart * training["total_batch"] // max(1, world))
    dense = counts["lm_head"] + counts["scalars"]
    most = 1 / max(1, world) if meets else most_matrices(plan)
    matrices = counts["transformer_matrices"] * (1 - most + (world - 1) * most)
    of_matrix, of_row = WIRE_BYTES[kind][0], MEETING_ROW_BYTES[kind] if meets else WIRE_BYTES[kind][1]
    shared = 0
    if not meets and head_of(plan, kind) == "shared":
        dense -= counts["lm_head"]
        tokens = [node["rows"] * model["sequence"] for node in plan["nodes"]]
        shared = head.most_bytes(tokens, model["n_embd"], int(of_row))
    return shared + int(
        ((dense * ring + matrices) * of_matrix + rows * model["n_embd"] * tables * (world - 1) * of_row) / apart
    )


def asked(plan: Plan, what: str) -> str:
    """What the settings say of sync, head or local_steps, where the plan's own is what came of it."""
    training = plan["training"]
    told: Mapping[str, str] = training.get("asked") or {}
    # Plans of before the head could be shared out say nothing of it.
    return str(told.get(what) or training.get(what) or "whole")


def head_of(plan: Plan, kind: str) -> str:
    """Whether the head is shared out with this way of sync: where that is left to the plan, it depends on the bytes."""
    training, model = plan["training"], plan["model"]
    if kind == training["sync"] or asked(plan, "head") != "auto" or len(plan["nodes"]) < 2:
        return str(training.get("head") or "whole")
    able = head.can_share(str(plan["nodes"][0].get("device", "cpu")), kind)
    tokens = [node["rows"] * model["sequence"] for node in plan["nodes"]]
    vocabulary = model["parameters"]["lm_head"] // model["n_embd"]
    return head.choose("auto", able, vocabulary, model["n_embd"], tokens, kind)


def local_overlap(apart: int) -> int:
    """Steps behind which the mean of a meeting travels, where the ranks make so many from one to the next."""
    return apart // 2


def waited_share(training: Mapping[str, Any], apart: int) -> float:
    """Of the meetings those for which all wait: where a checkpoint, an evaluation or a sample needs all ranks alike."""
    each = [int(training.get(name) or 0) for name in ("eval_every", "sample_every", "save_every")]
    # As the trainer moves them: to the next meeting.
    every = [-(-steps // apart) for steps in each if steps > 0]
    meetings = range(1, min(max(1, training["iterations"] // apart), MEETINGS_COUNTED) + 1)
    return sum(any(number % one == 0 for one in every) for number in meetings) / len(meetings)


def local_steps(plan: Plan) -> int:
    """Steps that each rank makes apart; none in plans of before there were any."""
    return int(plan["training"].get("local_steps") or 0) if plan["world"] > 1 else 0


def passes_of(plan: Plan, rows: Sequence[int]) -> List[float]:
    """The work of each rank in passes of device_batch rows; parts of the head are finer than rows."""
    training = plan["training"]
    passes = [share / training["device_batch"] for share in rows]
    parts = training.get("head_shares")
    if not parts or list(rows) != list(training["rows"]):
        return passes
    of_head = head_work(plan["model"])
    return [(1 - of_head) * own + of_head * sum(passes) * part / sum(parts) for own, part in zip(passes, parts)]


def predict(
    plan: Plan,
    speeds: Sequence[Speed],
    link: Optional[Link],
    rows: Sequence[int],
    sync: Optional[str] = None,
    local: Optional[int] = None,
) -> Step:
    """A step of all hosts, the rows in the order of the speeds; of those that are made apart, the mean of them."""
    training, world = plan["training"], plan["world"]
    kind = sync or training["sync"]
    apart = local_steps(plan) if local is None else local
    computing = [speed.compute(count) for speed, count in zip(speeds, passes_of(plan, rows))]
    sent = bytes_sent(plan, kind, apart)
    joined = link if world > 1 else None
    late = ROUNDS * joined.latency_ms / 1000 / max(1, apart) if joined else 0.0
    wire = sent * 8 / (joined.mbit * WIRE_SHARE * 1e6) if joined else 0.0
    slowest = max(computing)
    updates = [speed.optimizer(muon_share(plan, kind, apart)) for speed in speeds]
    behind, waited = hiding(kind, training, apart)
    hidden = behind * (slowest + max(updates))
    felt = waited * wire + (1 - waited) * max(FELT_SHARE * wire, wire - hidden)
    seconds = slowest + felt + late + max(updates)
    waits = {speed.host: round(seconds - own - update, 4) for speed, own, update in zip(speeds, computing, updates)}
    return Step(seconds, training["total_batch"] / seconds, waits, sent)


def hiding(kind: str, training: Mapping[str, Any], apart: int) -> Tuple[float, float]:
    """(the share of the computing behind which the wire can hide, the share of what is sent that does not hide at all)."""
    if apart:
        return local_overlap(apart) / apart, waited_share(training, apart)
    if kind == "ddp":
        return DDP_HIDDEN_SHARE, 0.0
    return (HIDDEN_SHARE, 0.0) if kind in WIRE_BYTES else (0.0, 1.0)


def steps_together(steps: int) -> int:
    """Steps that are made together in a run with local steps: at its begin and at its end, as the trainer's schedule.py has it."""
    return min(steps, min(-(-steps // COMMON_FIRST), MOST_FIRST) + min(-(-steps // COMMON_LAST), MOST_LAST))


def mean_step(
    plan: Plan,
    speeds: Sequence[Speed],
    link: Optional[Link],
    rows: Sequence[int],
    sync: Optional[str] = None,
    local: Optional[int] = None,
) -> Step:
    """The mean step of a whole run: with local steps, of those that are made apart and those that are not."""
    apart = (local_steps(plan) if local is None else local) if plan["world"] > 1 else 0
    together = predict(plan, speeds, link, rows, sync, 0)
    if not apart:
        return together
    steps = max(1, plan["training"]["iterations"])
    share = steps_together(steps) / steps
    alone = predict(plan, speeds, link, rows, sync, apart)

    def mean(one: float, other: float) -> float:
        return share * one + (1 - share) * other

    seconds = mean(together.seconds, alone.seconds)
    waits = {host: round(mean(wait, alone.wait_seconds[host]), 4) for host, wait in together.wait_seconds.items()}
    sent = int(mean(together.bytes_sent, alone.bytes_sent))
    return Step(seconds, plan["training"]["total_batch"] / seconds, waits, sent)


def speeds_of(plan: Plan, measured: Mapping[str, Any]) -> List[Speed]:
    """The measured steps in the order of the ranks; empty where one is missing."""
    found = [(node["host"], measured.get(node["host"]) or {}) for node in plan["nodes"]]
    if not all("pass_seconds" in one for dummy, one in found):
        return []
    return [Speed(host, one["pass_seconds"], one["adamw_seconds"], one["muon_seconds"]) for host, one in found]


# What auto takes

# By how little they round: those whose training held beside exact, see lab/performance.md.
BY_EXACTNESS = ("exact", "bf16", "int8", "int4")
# What a way that rounds less may cost of the speed of the fastest.
ALIKE = 0.95


def eligible(plan: Plan) -> List[str]:
    """The ways that auto may take for this model."""
    return [kind for kind in BY_EXACTNESS if not (packs(kind) and plan["model"]["n_embd"] % LEAST_BLOCK)]


def choose_sync(
    plan: Plan, speeds: Sequence[Speed], link: Link, rows: Sequence[int], local: Optional[int] = None
) -> str:
    """The way that rounds least of those that are nearly as fast as the fastest: exact where the link hides all that it sends."""
    steps = {kind: mean_step(plan, speeds, link, rows, kind, local).seconds for kind in eligible(plan)}
    fastest = min(steps.values())
    return next(kind for kind, seconds in steps.items() if ALIKE * seconds <= fastest)


def links_of(measured: Sequence[Mapping[str, Any]]) -> Optional[Link]:
    """The slowest of what each host measured towards the others; None unless every host did."""
    found = [one.get("link") for one in measured]
    links = [one for one in found if isinstance(one, dict) and one.get("mbit")]
    if not links or len(links) < len(measured):
        return None
    return Link(min(float(one["mbit"]) for one in links), max(float(one.get("latency_ms") or 0.0) for one in links))


def subject(model: Mapping[str, Any], device_batch: int) -> str:
    """By what a measured step is known to be one of this model."""
    return digest_of([model, device_batch])
