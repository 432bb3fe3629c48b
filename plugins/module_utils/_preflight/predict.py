# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Predicts the speed of one host and of all, from the rehearsal's measurements of steps and links, by the model of _plan/step_model.py.
Pure functions."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, TypedDict

from .._contract.decode import decode
from .._contract.document import Document
from .._contract.findings import Finding, finding
from .._contract.plan import Plan, Training
from .._contract.probe import Measured
from .._contract.validate import InvalidHostData
from .._kit.words import bytes_text, seconds_text, speed_text, table
from .._plan.step_model import WIRE_SHARE, Link, Speed, StepJob, choose_sync, fastest_precision, job_of, predict
from .._rules.shares import share_rows
from .._rules.ways import WAYS
from .._run.metrics import finite, json_lines

if TYPE_CHECKING:
    from .._run.health import Run
    from .peer_check import LinkTry

PAYS = 1.1  # below this gain several hosts are not worth the trouble
MOST_DOUBLINGS = 10  # of the batch
SLOWED = 1.25  # a step that transfers make this many times as long is slow
FEWEST_STEPS = 5  # whose speed says something
BUSY_LOAD = 2.0  # a processor's load in the last minute, which a run alone does not reach
# Below this the link is the limit, and a short all-reduce would underestimate it; above it, Gloo's copying is.
FAST_LINE = 2000.0
# The slowest link among some hosts; None if it is not known.
LinkOf = Callable[[Sequence[str]], Optional[Link]]


def last_object(result: Mapping[str, object]) -> Document:
    """The JSON object in the last line of a program's output; empty if there is none."""
    last = "".join(str(result.get("stdout") or "").strip().splitlines()[-1:])
    return next(json_lines(last.encode("utf-8", "replace")), {})


def program_answer(result: Mapping[str, object]) -> Document:
    """The JSON object printed by a trainer program, or its last output if there is none."""
    words = str(result.get("stderr") or result.get("msg") or "no output").strip().splitlines()
    return last_object(result) or {"ok": False, "phase": "start", "error": words[-1] if words else "no output"}


def measured_step(result: Mapping[str, object], key: str) -> Document:
    """The result of scripts.measure_step with what was measured; empty if it failed."""
    found = last_object(result) if result.get("rc") == 0 else {}
    with contextlib.suppress(InvalidHostData):
        return {"key": key, **decode(Measured, found)} if finite(found.get("tokens_per_second")) else {}
    return {}


def with_link(
    measured: Mapping[str, object], plan: Plan, links: Iterable[LinkTry], gloo: Mapping[str, object]
) -> Document:
    """A host's measured step with its slowest link and the model: what the plan needs to choose the best ddp_sync, and to tell other
    depths from it."""
    link = slowest_link(links, [last_object(gloo)])
    kept = {"link": link._asdict()} if link else {}
    return {**measured, **kept, "model": dict(plan["model"]), "device_batch": plan["training"]["device_batch"]}


def slowest_link(links: Iterable[LinkTry], gloo: Iterable[Mapping[str, object]]) -> Optional[Link]:
    """The link that every step waits for, by these links and by what the all-reduces on their hosts measured."""
    known = [(rate, link["latency_ms"] or 0.0) for link in links if (rate := link["bandwidth_mbit"])]
    reduced = list(gloo)
    if not known:
        return None
    rates = [rate for one in reduced if (rate := finite(one.get("bandwidth_mbit"))) and rate > 0]
    by_gloo = min(rates, default=0.0) / WIRE_SHARE
    # Both ends also send in an all-reduce; a busy CPU lowers either measurement, so the better one counts.
    rate = max(min(known)[0], by_gloo)
    if by_gloo and rate > FAST_LINE:
        rate = min(rate, by_gloo)
    message = max([0.0, *(finite(one.get("message_ms")) or 0.0 for one in reduced)])
    return Link(round(rate, 1), max(late for dummy, late in known), message)


class Outlook(TypedDict):
    """The expected speed and waits of a run."""

    one_host: str
    one_host_tokens_per_second: float
    tokens_per_second: float
    step_seconds: float
    wait_seconds: Dict[str, float]
    bytes_sent: int
    eta_seconds: float
    gain: float
    link_mbit: Optional[float]
    hosts: Dict[str, Dict[str, float]]  # tokens_per_second alone, and rows per step
    without: Dict[str, float]
    ways: Dict[str, Dict[str, float]]  # bytes_sent and tokens_per_second of each ddp_sync method
    auto_sync: Optional[str]
    batch: Optional[int]  # tokens per step with which transfers no longer slow it down much, where those of the plan do
    busy: List[str]  # hosts with other work during the measurement
    products: Dict[str, float]  # tokens per second of all hosts alone, if several precisions were measured


def outlook(
    plan: Plan,
    speeds: Sequence[Speed],
    link_of: LinkOf,
    products: Optional[Dict[str, float]] = None,
    busy: Sequence[str] = (),
) -> Outlook:
    """The prediction: one host compared with all. `products`: tokens per second of all hosts for each precision that was tried."""
    job, training, link = job_of(plan), plan["training"], link_of([speed.host for speed in speeds])
    passes = sum(job.rows) / job.device_batch
    best = min(speeds, key=lambda speed: speed.alone(passes))
    alone = training["total_batch"] / best.alone(passes)
    together, best_sync = predict(job, speeds, link), choose_sync(job, speeds, link)
    return {
        "one_host": best.host,
        "one_host_tokens_per_second": round(alone, 1),
        "tokens_per_second": round(together.tokens_per_second, 1),
        "step_seconds": round(together.seconds, 4),
        "wait_seconds": together.wait_seconds,
        "bytes_sent": together.bytes_sent,
        "eta_seconds": round(together.seconds * training["iterations"], 1),
        "gain": round(together.tokens_per_second / alone, 3),
        "link_mbit": link.mbit if link else None,
        "hosts": {
            speed.host: {"tokens_per_second": round(training["total_batch"] / speed.alone(passes), 1), "rows": share}
            for speed, share in zip(speeds, job.rows)
        },
        "without": without_each(plan, job, speeds, link_of),
        "ways": ways(job, speeds, link),
        "auto_sync": best_sync,
        "batch": larger_batch(job, speeds, link, best_sync),
        "busy": list(busy),
        "products": products or {},
    }


def without_each(plan: Plan, job: StepJob, speeds: Sequence[Speed], link_of: LinkOf) -> Dict[str, float]:
    """Tokens per second of the others with all rows of a step, without each host, if known."""
    follow = plan["training"].get("batch_split") in ("auto", "speed")
    places = [node.get("address") for node in plan["nodes"]]
    found: Dict[str, float] = {}
    for gone, place in zip(speeds, places):
        stay = {speed: share for speed, share in zip(speeds, job.rows) if speed is not gone}
        link = link_of([speed.host for speed in stay])
        weights = [1.0 / speed.pass_seconds if follow else float(share) for speed, share in stay.items()]
        # Without one of two nodes on a machine the other would have its processors, which no measurement covers.
        is_known = places.count(place) < 2 and (link or len(stay) == 1)
        if is_known and all(weight > 0 for weight in weights):
            shares = share_rows(sum(job.rows), weights)
            hosts = tuple(speed.host for speed in stay)
            part = dataclasses.replace(job, hosts=hosts, rows=tuple(shares), head_shares=())
            found[gone.host] = round(predict(part, list(stay), link).tokens_per_second, 1)
    return found


def ways(job: StepJob, speeds: Sequence[Speed], link: Optional[Link]) -> Dict[str, Dict[str, float]]:
    """The speed of each ddp_sync method over this link; empty if there is no choice."""
    if job.world < 2 or link is None:
        return {}
    steps = {kind: predict(job.under(kind), speeds, link) for kind in WAYS}
    return {
        kind: {"bytes_sent": step.bytes_sent, "tokens_per_second": round(step.tokens_per_second, 1)}
        for kind, step in steps.items()
    }


def larger_batch(job: StepJob, speeds: Sequence[Speed], link: Optional[Link], sync: Optional[str]) -> Optional[int]:
    """The tokens per step, a power of two times the job's, with which transfers no longer make a step clearly longer; None if they do
    not make one much longer now, or do so with any batch."""

    def slowdown(times: int) -> float:
        rows = tuple(times * one for one in job.rows)
        larger = dataclasses.replace(job, rows=rows, total_batch=times * job.total_batch).under(sync or job.sync)
        return predict(larger, speeds, link).seconds / predict(larger, speeds, None).seconds

    if slowdown(1) < SLOWED:
        return None
    hidden = (times for times in (2**power for power in range(1, MOST_DOUBLINGS + 1)) if slowdown(times) < PAYS)
    return (next(hidden, 0) * job.total_batch) or None


def advice(plan: Plan, predicted: Outlook) -> list[Finding]:
    """The findings from a prediction."""
    # Nodes of one machine share its cores: they are for demonstration, and nobody expects them to be faster.
    is_one_machine = len({node["address"] for node in plan["nodes"]}) < 2
    if is_one_machine or predicted["gain"] >= PAYS:
        return []
    host, one = predicted["one_host"], speed_text(predicted["one_host_tokens_per_second"])
    seen = f"{speed_text(predicted['tokens_per_second'])} tok/s on all hosts, {one} on {host} alone"
    remedy = f"Train on {host} alone: ansible-playbook train.yml -i INVENTORY -e target={host}"
    return [finding("not-worth-it", host, seen, remedy=remedy)]


def short(seconds: Optional[float]) -> str:
    """A short duration; a small model waits for milliseconds."""
    return seconds_text(seconds) if seconds is None or seconds >= 1 else f"{seconds * 1000:.0f} ms"


def prediction_text(plan: Plan, predicted: Outlook) -> str:
    """The prediction as text."""
    rows = [
        [
            host,
            speed_text(entry["tokens_per_second"]),
            str(entry["rows"]),
            short(predicted["wait_seconds"].get(host)),
            speed_text(predicted["without"].get(host)),
        ]
        for host, entry in predicted["hosts"].items()
    ]
    lines = table(["host", "tok/s alone", "rows", "waits a step", "tok/s without it"], rows)
    if plan["world"] > 1:
        lines.append(
            f"  all together: {speed_text(predicted['tokens_per_second'])} tok/s, {predicted['gain']:.2f} times "
            f"{predicted['one_host']} alone; a step of {short(predicted['step_seconds'])} sends "
            f"{bytes_text(predicted['bytes_sent'])} from each host"
        )
    lines += [*ways_lines(plan, predicted["ways"]), *choices(plan["training"], predicted)]
    if predicted["batch"]:
        lines.append(
            f"  a step of {plan['training']['total_batch']} tokens is too short to hide what it sends over this link; "
            f"ddp_total_batch {predicted['batch']} would be long enough"
        )
    lines.append(f"  {plan['training']['iterations']} steps take about {seconds_text(predicted['eta_seconds'])}")
    return "\n".join(["Expected", *lines])


def ways_lines(plan: Plan, found: Mapping[str, Mapping[str, float]]) -> List[str]:
    """Every ddp_sync method compared with the chosen one."""
    taken, auto = plan["training"]["sync"], job_of(plan).sync_open
    rows = [
        [
            kind + ((" (auto)" if auto else " (set)") if kind == taken else ""),
            bytes_text(entry["bytes_sent"]),
            speed_text(entry["tokens_per_second"]),
        ]
        for kind, entry in found.items()
    ]
    return table(["ddp_sync", "sent a step", "tok/s"], rows) if rows else []


def choices(training: Training, predicted: Outlook) -> List[str]:
    """Why ddp_sync and ddp_matmul are as they are where they are auto, or what the measurements suggest in their place."""
    found = []
    if best := predicted["auto_sync"]:
        why = f"the least rounding that hides behind a link of {predicted['link_mbit'] or 0:.0f} Mbit/s"
        found.append(choice("ddp_sync", training["sync"], best, why))
    if speeds := predicted["products"]:
        each = ", ".join(f"{matmul} {speed_text(speed)} tok/s" for matmul, speed in speeds.items())
        why = f"measured without the optimizer, all hosts together: {each}"
        found.append(choice("ddp_matmul", training["matmul"], fastest_precision(speeds), why))
    return found


def choice(name: str, taken: str, best: str, why: str) -> str:
    """A plan made before the measurement differs from it, and a run that has begun keeps its choice."""
    if best == taken:
        return f"  {name} auto is {taken}: {why}"
    return f"  {name} auto is {taken} in this plan, and {best} in a new run: {why}. A run that has begun changes with -e {name}={best}"


def comparison_text(predicted: Outlook, happened: Mapping[str, Run]) -> str:
    """The prediction compared with the result (host -> run_info); empty if there is none, or after few steps."""
    told = [run for run in happened.values() if run["steps_counted"] >= FEWEST_STEPS]
    speeds = [run["tokens_per_second_mean"] for run in told if run.get("tokens_per_second_mean")]
    if not speeds or not predicted.get("tokens_per_second"):
        return ""
    speed, expected = min(speeds), predicted["tokens_per_second"]
    busy = [host for host, run in happened.items() if (run.get("load") or 0.0) > BUSY_LOAD]
    whens = {"during the rehearsal": predicted.get("busy"), "while it trained": busy}
    said = [f"{' and '.join(hosts)} had other work {when}" for when, hosts in whens.items() if hosts]
    how = f"; not comparable, because {' and '.join(said)}" if said else f" ({speed / expected - 1:+.0%})"
    lines, rows = [f"Expected {speed_text(expected)} tok/s, got {speed_text(speed)}{how}"], []
    for host, run in happened.items():
        waited, made = run["wait_seconds"], run["steps_counted"]
        each = waited / made if waited is not None and made else None
        rows.append([host, short(predicted["wait_seconds"].get(host)), short(each)])
    lines += table(["host", "expected wait per step", "waited"], rows)
    sent = next((run["bytes_sent"] for run in happened.values() if run.get("bytes_sent")), None)
    if sent and predicted.get("bytes_sent"):
        lines.append(
            f"  expected to send {bytes_text(predicted['bytes_sent'])} per step from each host, sent {bytes_text(sent)}"
        )
    return "\n".join(lines)
