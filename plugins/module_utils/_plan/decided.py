# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions that the settings leave open (auto, empty, or ruled out by a stage or trainer), each with its author.

The settings themselves stay as the user wrote them; the plan document is made from both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Generic, Sequence, Tuple, TypeVar

from .._contract.settings import Asked
from .._contract.settings_table import AUTO, PREFIX, RunSettings, find
from . import matmul_precision, stages
from .hosts import Host

T = TypeVar("T")

# Authors of decisions.
USER = "user"
DEFAULT = "default"
PROFILE = "profile"
STAGE = "stage"
TRAINER = "trainer"  # the trainer supports nothing else
KEPT = "resumed run"
MEASURED = "measured"
HOSTS = "hosts"  # their number, cores or devices

# Values of ddp_batch_split for which shares follow the speeds.
FOLLOWING = (AUTO, "speed")


@dataclasses.dataclass(frozen=True)
class Decision(Generic[T]):
    """A value, its author, and the reason if not obvious."""

    value: T
    by: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Basis:
    """Decisions that depend on neither batch nor link."""

    name: str  # of the run
    stage: str
    ours: bool  # whether this collection's trainer is used
    matmul: Decision[str]
    matmul_tried: Tuple[str, ...]  # measured by the rehearsal, if it may choose
    iterations: Decision[int]
    timed: bool  # whether it ends at a time, and the iterations are an estimate
    restarts: Decision[int]
    min_hosts: Decision[int]
    survive_reboot: Decision[bool]
    batch_split: Decision[str]

    @property
    def goes_on(self) -> bool:
        """Whether the trainer finds the newest checkpoint itself, and removes older ones."""
        return self.ours or self.stage == stages.BASE


@dataclasses.dataclass(frozen=True)
class Decided(Basis):
    """All decisions of a plan."""

    total_batch: Decision[int]
    device_batch: Decision[int]
    rows: Tuple[int, ...]  # of a step, by rank
    head_parts: Tuple[int, ...]  # weights of the parts of a shared head, by rank
    sync: Decision[str]
    head: Decision[str]
    head_open: bool  # whether another ddp_sync may have another head
    rebalance: Decision[bool]
    save_minutes: Decision[int]

    @property
    def head_shares(self) -> Tuple[int, ...]:
        """The weights of unequal parts, if any."""
        return self.head_parts if self.head.value == "shared" and len(set(self.head_parts)) > 1 else ()

    def reasons(self) -> Dict[str, Dict[str, object]]:
        """Every decision for people and programs: {name: {value, by, why}}."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: dataclasses.asdict(one) for name, one in found.items() if isinstance(one, Decision)}


def all_decided(basis: Basis, **rest: Any) -> Decided:
    """The basis with the other decisions."""
    return Decided(**{field.name: getattr(basis, field.name) for field in dataclasses.fields(basis)}, **rest)


def as_set(asked: Asked, field: str) -> Decision[Any]:
    """A decision that just repeats a setting. An inventory that repeats a default decides nothing."""
    row, value = find(PREFIX + field), getattr(asked.run, field)
    is_set = row.name in asked.given and value != row.default
    return Decision(value, USER if is_set else PROFILE if row.from_profile else DEFAULT)


def decide_basis(asked: Asked, hosts: Sequence[Host]) -> Basis:
    """Everything that depends on neither batch nor link."""
    run = asked.run
    ours = run.trainer_source == "ours"
    tried = _tries_products(run, hosts)
    matmul = _matmul(asked, tried, hosts)
    restarts, min_hosts, survive_reboot = _keepers(asked, ours, len(hosts))
    return Basis(
        name=stages.run_name(run),
        stage=run.stage,
        ours=ours,
        matmul=matmul,
        matmul_tried=matmul_precision.TRIED if tried else (matmul.value,),
        iterations=iterations(asked),
        timed=bool(run.budget or run.finish_by) and "ddp_iterations" not in asked.given,
        restarts=restarts,
        min_hosts=min_hosts,
        survive_reboot=survive_reboot,
        batch_split=_batch_split(asked, ours),
    )


def _tries_products(run: RunSettings, hosts: Sequence[Host]) -> bool:
    """Whether the rehearsal tries several precisions of matrix products."""
    able = run.trainer_source == "ours" and run.matmul == AUTO
    return able and all(host.fact("cpu", "native_bf16") for host in hosts)


def _matmul(asked: Asked, tried: bool, hosts: Sequence[Host]) -> Decision[str]:
    if asked.run.matmul != AUTO:
        return as_set(asked, "matmul")
    if not tried:
        return Decision("fp32", DEFAULT)
    kept = matmul_precision.kept_precision([host.kept.get("matmul") for host in hosts])
    if kept:
        return Decision(kept, KEPT)
    speeds = matmul_precision.speeds_together([host.measured for host in hosts])
    return Decision(matmul_precision.fastest(speeds), MEASURED if speeds else DEFAULT)


def iterations(asked: Asked) -> Decision[int]:
    """Steps of this stage."""
    if asked.run.stage == stages.SFT:
        return as_set(asked, "sft_iterations")
    return as_set(asked, "iterations")


def _keepers(asked: Asked, ours: bool, hosts: int) -> Tuple[Decision[int], Decision[int], Decision[bool]]:
    """(restarts, min_hosts, survive_reboot)."""
    run = asked.run
    restarts = as_set(asked, "restarts")
    if restarts.by != USER and not (ours and run.resume):
        restarts = Decision(0, TRAINER, "restarts need ddp_resume and this collection's trainer")
    able = restarts.value > 0
    min_hosts, survive_reboot = as_set(asked, "min_hosts"), as_set(asked, "survive_reboot")
    if min_hosts.by != USER:
        is_half = able and run.profile == "real"
        min_hosts = Decision(-(-hosts // 2), PROFILE, "half of the hosts") if is_half else Decision(0, PROFILE)
    if survive_reboot.by != USER:
        survive_reboot = Decision(able and survive_reboot.value, PROFILE)
    return restarts, min_hosts, survive_reboot


def _batch_split(asked: Asked, ours: bool) -> Decision[str]:
    """Only our own trainer supports unequal shares."""
    split = as_set(asked, "batch_split")
    return Decision("equal", TRAINER) if split.value == AUTO and not ours else split


def may_lose_hosts(basis: Basis, hosts: int) -> bool:
    """Whether the run can continue with fewer hosts because the user said so; the profile's number does not make steps slower."""
    return bool(basis.restarts.value and basis.min_hosts.by == USER and 0 < basis.min_hosts.value < hosts)


def decide_rebalance(asked: Asked, basis: Basis, hosts: int) -> Decision[bool]:
    """Decide whether the shares follow the speeds during training."""
    able = basis.ours and hosts > 1
    if asked.run.rebalance and not (able and basis.batch_split.value in FOLLOWING):
        return Decision(False, HOSTS, "changing shares needs several hosts and ddp_batch_split auto or speed")
    return as_set(asked, "rebalance")


def decide_save_minutes(asked: Asked, basis: Basis) -> Decision[int]:
    """Maximum minutes between checkpoints; 0 if only steps count."""
    return as_set(asked, "save_minutes") if basis.ours else Decision(0, TRAINER)
