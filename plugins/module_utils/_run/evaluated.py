# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts about a run that only evaluates a model (ddp_stage eval): no steps, one result."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, TypedDict

from .._contract.document import Document, section, text, whole
from .._kit.words import DASH, loss_text
from .._rules.stages import EVAL

CLOSING = ("host", "rank", "state")
STATUS = ("host", "rank", "state", "batches", "val bpb")
Run = Mapping[str, Any]  # what run_info returned


class StageOf(TypedDict):
    """A run's stage (ddp_stage), and the base model's step once known."""

    stage: Optional[str]
    base: Optional[str]
    step: Optional[int]


def stage_of(plan: Document) -> Optional[StageOf]:
    """The stage of a plan; None for a base model."""
    stage = section(plan, "stage")
    return {"stage": text(stage, "stage"), "base": text(stage, "base"), "step": whole(stage, "step")} if stage else None


def is_evaluation(run: Run) -> bool:
    """Whether the stage only evaluates."""
    return (run.get("stage") or {}).get("stage") == EVAL.name


def are_evaluations(runs: Sequence[Run]) -> bool:
    """The same for all hosts that have the run."""
    known = [run for run in runs if run.get("run") and run.get("state") is not None]
    return bool(known) and all(is_evaluation(run) for run in known)


def batches_text(run: Run) -> str:
    """The rank's current batch and their number."""
    if not run.get("batch"):
        return DASH
    return "%s/%s" % (run["batch"], run["batches"]) if run.get("batches") else str(run["batch"])


def result_text(run: Run) -> str:
    """The result of this rank; the first rank has the total."""
    return "" if run.get("val_bpb") is None else "%s bits per byte" % loss_text(run["val_bpb"])


def result_lines(runs: Sequence[Run]) -> List[str]:
    """The result and what was evaluated."""
    found = next((run for run in runs if run.get("val_bpb") is not None), None)
    if found is None:
        return ["  nothing was measured"]
    stage = found["stage"]
    return ["  step %s of the run %s: %s of the validation shard" % (stage["step"], stage["base"], result_text(found))]
