# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fits a training into a given time (ddp_budget, ddp_finish_by): its end, and its model. Pure functions.

nanochat's laws give the tokens and batch of each depth. These grow several times from one depth to the next, so the plan takes
the depth whose tokens in the time come closest, more or fewer. Speeds come from the rehearsal, scaled to other depths by FLOPs
per token. Without them nothing is promised: the plan has the profile's depth, and is recomputed once a start has measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .._contract.document import number, section
from .._contract.plan import Model
from .._contract.settings import Asked
from .._contract.settings_table import AUTO, RunSettings
from .._kit.words import bytes_text, clock_text, plural, seconds_text, table
from .._rules.model_size import parameters
from .._rules.schedule import EVAL_SHARE, REFERENCE_DEPTH, SAVE_RATE, auto_batch_size
from .._rules.shares import share_rows
from . import stages
from .host_checks import MEMORY_SHARE
from .hosts import Host, neighbours
from .model_memory import describe, memory, shape_of
from .step_model import Speed, StepJob, choose_sync, links_of, predict

UNITS = {"d": 86400, "h": 3600, "m": 60}
DEPTHS = range(2, 41, 2)
TARGET_RATIO = 12.0  # tokens per parameter of the matrices and the head
TOO_FEW = 0.5  # fraction of the wanted tokens
# With fewer, a small model hardly leaves the warm-up. 532 steps of the law's batch beat 960 of half of it (docs/guides/by-the-morning.md).
LEAST_STEPS = 500
# From launch to first step; the same with checks and rehearsal; the same with installing the trainer's environment.
START_SECONDS, SETUP_SECONDS, VENV_SECONDS = 10.0, 60.0, 180.0
# Controller time after the run, reserved before the deadline.
COLLECT_SECONDS, COLLECT_RATE = 6.0, 50e6
LEAST_SECONDS = 10.0  # of training
MOST_KEPT = 2**36
SAVES = 10


class Row(NamedTuple):
    """A candidate model; seconds are None if a host or link was never measured."""

    run: RunSettings  # with this row's depth, batch and steps
    model: Model
    memory_bytes: int
    fits_memory: bool
    alone: Dict[str, Optional[float]]  # seconds per step
    together: Optional[float]

    @property
    def parameters(self) -> int:
        """The parameters that determine the number of tokens: those of the matrices and the head."""
        return self.model["parameters"]["transformer_matrices"] + self.model["parameters"]["lm_head"]

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.run.iterations * self.run.total_batch / self.parameters

    def share(self, seconds: float) -> float:
        """Fraction of the steps in this time."""
        return max(1.0, seconds) / (self.run.iterations * (self.together or 1.0))

    def seconds_for_steps(self, left: float) -> float:
        """Of the seconds left, those between the first and the last step."""
        run, size = self.run, self.model["parameters"]["total"]
        evaluation = EVAL_SHARE * run.eval_tokens / run.total_batch * (self.together or 0.0)
        save = 12 * size / SAVE_RATE
        return left - START_SECONDS - evaluation * (run.eval_every > 0) - save - collect_seconds(run, self.model)


class ModelChoice(NamedTuple):
    """The rows, the chosen one with its reason, and the depth at which the speeds were measured."""

    rows: Sequence[Row]
    taken: Row
    why: str
    seconds: float  # for steps
    measured_depth: Optional[int]


def deadline(run: RunSettings, begun: float) -> float:
    """When a training that began at `begun` must end, in seconds since 1970, by this machine's clock and time zone."""
    if run.budget:
        return begun + sum(int(count) * UNITS[unit] for count, unit in re.findall(r"(\d+)([dhm])", run.budget))
    start = datetime.datetime.fromtimestamp(begun)
    *date, clock = re.split("[ T]", str(run.finish_by))
    hour, minute = map(int, clock.split(":"))
    day = datetime.date(*map(int, date[0].split("-"))) if date else start.date()
    end = datetime.datetime.combine(day, datetime.time(hour, minute))
    return (end if date or end > start else end + datetime.timedelta(days=1)).timestamp()


def fit_model(
    asked: Asked, hosts: Sequence[Host], since: float, now: float, began: float
) -> Tuple[Asked, Optional[ModelChoice], List[str]]:
    """The settings with the model that fits the time, the choice, and any problems. A resumed run (`since` is set) keeps its
    model; later changes by the user are reported as a difference."""
    run = asked.run
    late = list(problems(run, hosts, since, began))
    if not (run.budget or run.finish_by) or late:
        return asked, None, late
    for host in hosts if since else ():
        kept = {name: number(host.kept, name) for name in ("total_batch", "iterations")}
        kept["depth"] = number(section(section(host.kept, "lineage"), "model"), "depth")
        # No host can make a plan that is never finished.
        if all(0 < value <= MOST_KEPT for value in kept.values()) and kept["depth"] <= max(DEPTHS) * 25:
            return with_model(asked, run, kept), None, []
    left = deadline(run, since or began) - now
    choice = choose(asked, hosts, left)
    few = f"Of {run.finish_by or run.budget} {seconds_text(max(0.0, left))} are left now, too few to train, save and collect"
    short = [f"{few}; give more time"] if choice.seconds < LEAST_SECONDS else []
    return with_model(asked, choice.taken.run, {}), choice, short


def problems(run: RunSettings, hosts: Sequence[Host], begun: float, now: float) -> Iterator[str]:
    """Why such a run is impossible; a resumed one can only be late."""
    name, text = ("ddp_budget", run.budget) if run.budget else ("ddp_finish_by", run.finish_by)
    if text is None:
        return
    if run.budget and run.finish_by:
        yield "ddp_budget and ddp_finish_by are both set; remove one of them."
        return
    if run.stage != stages.BASE:
        yield f"{name} is set, but ddp_stage is {run.stage}; only a base model can be fitted into a time: remove it."
    try:
        left = deadline(run, begun or now) - now
    except (ValueError, OverflowError):
        yield f"{name} is {text!r}, which is not a date and time; write it like 2026-11-25 07:30."
        return
    needs = SETUP_SECONDS if all(host.fact("python", "venv", "torch") for host in hosts) else VENV_SECONDS
    if left < needs and not begun:
        has = f"{name} is {text}, which leaves {seconds_text(max(0.0, left))}"
        yield f"{has}, but setting up and checking the hosts takes about {seconds_text(needs)}; allow more time."


def collect_seconds(run: RunSettings, model: Model) -> float:
    """Controller seconds after the run: to notice the end, and to collect metrics, report and checkpoint."""
    return COLLECT_SECONDS + 4 * model["parameters"]["total"] / COLLECT_RATE if run.watch else 0.0


def speed_at(host: Host, model: Model, device_batch: int) -> Optional[Speed]:
    """A host's speed at a depth, scaled from the measured one."""
    found, now = host.measured, work_of(model, device_batch)
    before = work_of(section(found, "model"), number(found, "device_batch"))
    parts: List[Any] = [found.get(name) for name in ("pass_seconds", "adamw_seconds", "muon_seconds")]
    if None in parts or not all(before):
        return None
    growth = [new / old for new, old in zip(now, before)]
    half = found.get("muon_half_seconds", 0.0) * growth[2]
    return Speed(host.name, *(part * more for part, more in zip([*parts, half], [*growth, 1.0])))


def work_of(model: Mapping[str, object], device_batch: int) -> Tuple[float, float, float]:
    """The amounts of work that the times of a pass, of AdamW and of Muon are proportional to."""
    sizes, tokens = section(model, "parameters"), device_batch * number(model, "sequence")
    muon = number(sizes, "transformer_matrices") * number(model, "n_embd")
    return number(model, "flops_per_token") * tokens, number(sizes, "lm_head"), muon


def settings_by_laws(asked: Asked, depth: int, hosts: int, most: float = math.inf) -> RunSettings:
    """The settings with this depth, and nanochat's laws for it: TARGET_RATIO tokens per parameter, but no more than `most`, and
    the batch for them."""
    run = dataclasses.replace(asked.run, depth=depth)
    counts = [parameters(shape_of(dataclasses.replace(run, depth=one))) for one in (depth, REFERENCE_DEPTH)]
    own, reference = (TARGET_RATIO * (count["transformer_matrices"] + count["lm_head"]) for count in counts)
    tokens, batch = int(min(most, own)), run.total_batch
    if "ddp_total_batch" not in asked.given:
        batch = auto_batch_size(tokens, reference)
        # Every host needs a row.
        least = run.sequence * hosts * (run.device_batch if "ddp_device_batch" in asked.given else 1)
        while batch // 2 >= least and tokens < LEAST_STEPS * batch:
            batch //= 2
        batch = max(batch, least)
    steps = run.iterations if "ddp_iterations" in asked.given else max(1, tokens // batch)
    return dataclasses.replace(run, total_batch=batch, iterations=steps)


def row_of(run: RunSettings, hosts: Sequence[Host]) -> Row:
    """Time and memory of a depth on these hosts."""
    model = describe(shape_of(run), run.aspect_ratio)
    speeds = {host.name: speed_at(host, model, run.device_batch) for host in hosts}
    needed = memory(shape_of(run), run.device_batch)
    room = [host.fact("memory", "total") * MEMORY_SHARE / neighbours(host, hosts) for host in hosts if host.probe]
    passes = run.total_batch / run.sequence / run.device_batch
    alone = {name: speed.alone(passes) if speed else None for name, speed in speeds.items()}
    known = [speed for speed in speeds.values() if speed is not None]
    row = Row(run, model, needed, all(needed <= one for one in room), alone, None)
    link = links_of([host.measured for host in hosts])
    if len(known) < len(hosts) or (link is None and len(hosts) > 1):
        return row
    # With rows by speed, and the ddp_sync that the plan would have.
    rows = share_rows(max(run.total_batch // run.sequence, len(hosts)), [1 / speed.pass_seconds for speed in known])
    job = StepJob(tuple(speeds), tuple(rows), model, run.total_batch, run.device_batch, run.sync == AUTO)
    head = "whole" if run.min_hosts and run.head == AUTO else run.head
    job = job.with_sync("exact" if run.sync == AUTO else run.sync, head)
    best = choose_sync(job, known, link)
    return row._replace(together=predict(job.with_sync(best, head) if best else job, known, link).seconds)


def choose(asked: Asked, hosts: Sequence[Host], left: float) -> ModelChoice:
    """The model for this many seconds."""
    depths = [asked.run.depth] if "ddp_depth" in asked.given else DEPTHS
    rows = [row_of(settings_by_laws(asked, depth, len(hosts)), hosts) for depth in depths]
    measured = next((number(section(host.measured, "model"), "depth") for host in hosts if host.measured), 0) or None
    if any(row.together is None for row in rows):
        at = row_of(settings_by_laws(asked, asked.run.depth, len(hosts)), hosts)
        why = "some hosts or links are not measured yet; a start measures them at this depth and plans again"
        return ModelChoice(rows, at, why, left, measured)
    able = [row for row in rows if row.fits_memory] or rows[:1]
    taken = min(able, key=lambda row: abs(math.log(row.share(row.seconds_for_steps(left)))))
    seconds = taken.seconds_for_steps(left)
    if "ddp_depth" in asked.given:
        why = "its depth is set"
    elif taken is able[0] and taken.share(seconds) < TOO_FEW:
        why = "the smallest, but the time is too short even for that: it gets far too few tokens"
    else:
        why = f"it comes closest to nanochat's {TARGET_RATIO:g} tokens per parameter in this time"
    if "ddp_iterations" not in asked.given:
        # As many steps as the time allows; fewer tokens mean a smaller batch, which changes the step.
        tokens = max(1.0, seconds) * taken.run.total_batch / (taken.together or 1.0)
        taken = row_of(settings_by_laws(asked, taken.run.depth, len(hosts), tokens), hosts)
        steps = max(1, int(max(1.0, seconds) / (taken.together or 1.0)))
        taken = taken._replace(run=dataclasses.replace(taken.run, iterations=steps))
    return ModelChoice(rows, taken, why, seconds, measured)


def with_model(asked: Asked, run: RunSettings, kept: Mapping[str, int]) -> Asked:
    """The settings with a model and batch filled in; kept: those of the resumed run, if any."""
    seconds = deadline(run, 0.0) if run.budget else float(UNITS["h"])
    minutes = max(1, min(run.save_minutes, int(seconds / 60 / SAVES)))
    more: Dict[str, Any] = {"save_every": -1, "save_minutes": minutes, **kept}
    left_open = {name: value for name, value in more.items() if f"ddp_{name}" not in asked.given}
    return dataclasses.replace(asked, run=dataclasses.replace(run, **left_open))


def render(choice: ModelChoice, end: Optional[float]) -> str:
    """The table around the chosen row, and the reason."""
    taken = choice.taken
    at = [row.run.depth for row in choice.rows].index(taken.run.depth)
    head = ["depth", "parameters", "tokens", "a parameter", "steps", "batch"]
    head += [f"{host} alone" for host in taken.alone] + ["together", "memory", "gets in time"]
    lines = ["What fits the time (parameters of matrices and head; hours for the wanted tokens)"]
    cells = []
    for row in choice.rows[max(0, at - 2) : at + 3]:
        run, times = row.run, [*row.alone.values(), row.together]
        hours = ["not measured" if step is None else f"{step * run.iterations / 3600:.2g} h" for step in times]
        gets = "?" if row.together is None else f"{row.ratio * row.share(choice.seconds):.3g} a parameter"
        name = f"{run.depth}{' *' if run.depth == taken.run.depth else ''}"
        tokens = f"{run.iterations * run.total_batch / 1e6:.0f}M"
        sizes = [name, f"{row.parameters / 1e6:.1f}M", tokens, f"{row.ratio:.1f}"]
        sizes += [str(run.iterations), str(run.total_batch)]
        cells.append([*sizes, *hours, bytes_text(row.memory_bytes), gets if row.fits_memory else "no memory"])
    lines += table(head, cells)
    when = "ends after the steps of ddp_iterations" if end is None else f"ends at {clock_text(end)}"
    lines.append(f"  {when}; takes depth {taken.run.depth}: {choice.why}")
    if taken.together is not None:
        got = f"about {plural(taken.run.iterations, 'step')} of {taken.run.total_batch} tokens, {taken.ratio:.1f} per parameter"
        lines.append(f"  {seconds_text(choice.seconds)} for steps: {got}")
        lines += [f"  measured at depth {choice.measured_depth}; other depths are scaled by their FLOPs per token"]
    return "\n".join(lines)
