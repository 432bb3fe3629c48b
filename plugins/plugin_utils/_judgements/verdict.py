# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The doctor's verdict over the evidence of all ranks; the reasoning is in module_utils/_doctor/judge.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...module_utils._doctor.case import bundle
from ...module_utils._doctor.judge import diagnose
from ...module_utils._kit.printable import printable
from .evidence import OF_PLAN, JudgeTask, Options, evidence_of, keep

OPTIONS: Options = {
    **OF_PLAN,
    "secrets": {"type": "list", "elements": "dict", "default": []},
    "file": {"type": "path"},
}


def judge_verdict(task: JudgeTask) -> dict[str, object]:
    """The doctor's single finding with its evidence, stored in a file."""
    options = task.options
    plan, evidence = options["plan"], options["evidence"]
    told = diagnose(plan, evidence_of((node["host"] for node in plan["nodes"]), evidence))
    summary = {"verdict": told["verdict"], "summary": told["evidence"]}
    keep(options["file"], bundle(plan, evidence, options["secrets"], summary), "The evidence", 0o600)
    return {**told, "text": printable(text_of(told, options["file"]))}


def text_of(told: Mapping[str, Any], path: str | None) -> str:
    """The verdict for people."""
    verdict = told["verdict"]
    lines = [f"{verdict['code']}: {verdict['seen']}", f"  why: {verdict['why']}", f"  do:  {verdict['remedy']}"]
    lines += [f"  {line}" for line in told["evidence"]]
    return "\n".join([*lines, *([f"  full evidence: {path}"] if path else [])])
