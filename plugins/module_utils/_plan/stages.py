# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages of a model (ddp_stage): pretrain, or fine-tune on conversations.

Fine-tuning is a separate run beside the base model's, NAME-sft.
"""

from __future__ import annotations

import os
import re
from typing import Iterator, Sequence

from .._contract import lineage
from .._contract.findings import Finding, finding
from .._contract.plan import Here, Plan, Stage
from .._contract.run_folder import CHECKPOINTS, CONVERSATIONS, HELD_OUT
from .._contract.settings_table import RunSettings
from .._rules import stages as rules
from .hosts import Host

BASE, SFT = rules.BASE.name, rules.SFT.name
SCRIPTS = {name: stage.script for name, stage in rules.STAGES.items()}


def base_name(run: RunSettings) -> str:
    """The name of the base model's run."""
    if run.run:
        return str(run.run)
    if run.budget or run.finish_by:
        # The depth is not chosen yet.
        return re.sub("[^0-9A-Za-z-]", "", f"by-{run.finish_by}" if run.finish_by else f"for-{run.budget}")
    return f"d{run.depth}"


def run_name(run: RunSettings) -> str:
    """The name of this run."""
    return base_name(run) if run.stage == BASE else f"{base_name(run)}-{run.stage}"


def flags(run: RunSettings, run_dir: str) -> dict[str, object]:
    """Flags that only a stage's script has."""
    if run.stage == BASE:
        return {}
    name = base_name(run)
    # In the base model's run folder, which lies beside this one.
    folder = os.path.join(os.path.dirname(run_dir), name, CHECKPOINTS[0], name)
    found: dict[str, object] = {"base-checkpoints": folder}
    if run.stage == SFT:
        found["conversations"] = os.path.join(run_dir, CONVERSATIONS)
        if run.sft_val_data:
            found["val-conversations"] = os.path.join(run_dir, HELD_OUT)
    return found


def document(run: RunSettings, here: Here) -> Stage | None:
    """The plan's section, None for a base model."""
    if run.stage == BASE:
        return None
    section: Stage = {"stage": run.stage, "base": base_name(run)}
    if run.stage == SFT:
        section["conversations"] = here["conversations"]
        if run.sft_val_data:
            section["held_out"] = here["held_out"]
    return section


def obstacles(run: RunSettings, hosts: Sequence[Host], plan: Plan) -> Iterator[Finding]:
    """Why there is no model to start from."""
    stage, name = run.stage, base_name(run)
    if stage == BASE or any(host.fact("run", "checkpoints") for host in hosts):
        return
    having = [host for host in hosts if host.fact("base_run", "checkpoints")]
    if not having:
        yield finding("base-refused", "", f"no host has a checkpoint of the run {name}, which ddp_stage {stage} needs")
    for host in having:
        if found := lineage.differences(host.fact("base_run", "lineage") or {}, plan):
            seen = f"the base model of the run {name} does not match: {', '.join(found)}"
            yield finding("base-refused", host.name, seen)


def in_words(section: Stage) -> str:
    """A stage as text."""
    base = f"the run {section['base']}"
    if "conversations" in section:
        talks, held_out = section["conversations"], section.get("held_out")
        beside = f", and evaluates it on the {held_out['count']} of {held_out['path']}" if held_out else ""
        return f"fine-tunes the model of {base} on {talks['count']} conversations of {talks['path']}{beside}"
    return f"continues the model of {base} with {SCRIPTS[section['stage']]}"
