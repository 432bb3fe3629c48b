# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the evaluations of finished trainings of base models on this host."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
from typing import List, Optional, Tuple

from .._contract import lineage
from .._contract.document import number, section
from .._contract.probe import Finished
from .._contract.run_folder import PLAN, PREVIOUS, TRAINING_FILE
from .._contract.training import training_of
from .._kit.files import read_object

NEWEST = 20
MOST_EVALS = 100


def finished_trainings(base: str) -> List[Finished]:
    """Those of the newest metrics, the newest first, including outputs that a fresh start set aside."""
    runs = os.path.join(glob.escape(base), "runs", "*")
    patterns = [os.path.join(folder, "metrics-rank*.jsonl") for folder in (runs, os.path.join(runs, PREVIOUS, "*"))]
    times = {}
    for path in [path for pattern in patterns for path in glob.glob(pattern)]:
        with contextlib.suppress(OSError):
            times[path] = os.path.getmtime(path)
    newest = sorted(times, key=lambda path: times[path], reverse=True)[:NEWEST]
    found = [finished_training(path, os.path.relpath(path, os.path.join(base, "runs"))) for path in newest]
    return [one for one in found if one is not None]


def finished_training(path: str, name: str) -> Optional[Finished]:
    """The training of a metrics file; None if it has no last evaluation, or fine-tuned a model."""
    folder, evals = os.path.dirname(path), evaluations(path)
    plan = read_object(os.path.join(folder, PLAN))
    if not evals or evals[-1][1] < 1 or not plan or "stage" in plan:
        return None
    training, here = section(plan, "training"), training_of(read_object(os.path.join(folder, TRAINING_FILE)))
    return {
        "run": name.split(os.sep)[0],
        "training": here["id"] if here else None,
        "lineage": lineage.of_plan(plan),
        "eval_tokens": number(training, "eval_tokens"),
        "total_batch": number(training, "total_batch"),
        "tokens": evals[-1][0] * number(training, "total_batch"),
        "evals": [[share, bits] for dummy, share, bits in [*evals[: -1 : -(-len(evals) // MOST_EVALS)], evals[-1]]],
    }


def evaluations(path: str) -> List[Tuple[int, float, float]]:
    """Steps, fraction of the schedule and bits per byte of a metrics file; without those that a restart repeated."""
    found: List[Tuple[int, float, float]] = []
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        for line in stream:
            # A long run has many more steps than evaluations.
            event = {}
            if b'"eval"' in line:
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
            if not isinstance(event, dict) or event.get("kind") != "eval":
                continue
            share, bits = event.get("share"), event.get("val_bpb")
            if isinstance(share, (int, float)) and isinstance(bits, float) and math.isfinite(bits):
                found = [one for one in found if one[1] < share] + [(number(event, "step"), float(share), bits)]
    return found
