# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run folder of a node: made, given its plan, and cleared of an earlier run's outputs without losing them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from typing import Any, Dict, List, Optional

from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object, write_whole

# What a run writes beside what it was given; all of it moves when a run starts anew.
OUTPUTS = ("base_checkpoints", "report", "log", "session.json")
OUTPUT_PREFIXES = ("metrics-rank", "heartbeat-rank")
PREVIOUS = "previous"
PLAN = "plan.json"


class RunFolderError(Exception):
    """The folder could not be brought into the wanted state; the text is for the user."""


def read_plan(run_dir: str) -> Optional[Dict[str, Any]]:
    """The plan that lies in the folder, None if there is none or it cannot be read."""
    return read_object(os.path.join(run_dir, PLAN)) or None


def continues(deployed: Optional[Dict[str, Any]], plan: Dict[str, Any]) -> bool:
    """Whether checkpoints made under the deployed plan are of use under the new one: same model, same data."""
    if deployed is None:
        return True
    return bool(
        deployed.get("model") == plan["model"]
        and (deployed.get("data") or {}).get("id") == (plan.get("data") or {}).get("id")
    )


def outputs(run_dir: str) -> List[str]:
    """Names of all that an earlier run wrote, in order."""
    try:
        names = os.listdir(run_dir)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"The run folder {run_dir} cannot be read: {error.strerror}.") from error
    return sorted(name for name in names if name in OUTPUTS or name.startswith(OUTPUT_PREFIXES))


def set_aside(run_dir: str, names: List[str]) -> None:
    """Move outputs into previous/, which keeps one generation.

    The new generation is gathered first and takes the name last, so that whatever interrupts this, one whole generation is left.
    """
    previous = os.path.join(run_dir, PREVIOUS)
    try:
        gathered = tempfile.mkdtemp(prefix=PREVIOUS + ".", dir=run_dir)
        for name in names:
            os.rename(os.path.join(run_dir, name), os.path.join(gathered, name))
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(gathered, previous)
    except OSError as error:
        raise RunFolderError(
            f"The earlier outputs in {run_dir} could not be moved to {previous}: {error.strerror}."
        ) from error


def plan_text(plan: Dict[str, Any]) -> str:
    return json.dumps(plan, indent=1, sort_keys=True) + "\n"


def write_plan(run_dir: str, plan: Dict[str, Any]) -> None:
    """Make the folder and put the plan there, whole or not at all."""
    try:
        os.makedirs(os.path.join(run_dir, "log"), exist_ok=True)
        write_whole(os.path.join(run_dir, PLAN), plan_text(plan))
    except OSError as error:
        raise RunFolderError(f"The plan could not be written to {run_dir}: {error.strerror}.") from error


def prepare(run_dir: str, plan: Dict[str, Any], fresh: bool, dry: bool) -> Dict[str, Any]:
    """Bring the folder to the plan; with dry, only say what would be done."""
    deployed = read_plan(run_dir)
    aside = outputs(run_dir) if fresh or not continues(deployed, plan) else []
    rewrite = deployed != plan or not os.path.isdir(os.path.join(run_dir, "log"))
    if not dry:
        if aside:
            set_aside(run_dir, aside)
        if rewrite or aside:
            write_plan(run_dir, plan)
    return {
        "changed": bool(rewrite or aside),
        "set_aside": aside,
        "diff": {
            "before_header": os.path.join(run_dir, PLAN),
            "after_header": os.path.join(run_dir, PLAN),
            "before": plan_text(deployed) if deployed else "",
            "after": plan_text(plan),
        },
    }
