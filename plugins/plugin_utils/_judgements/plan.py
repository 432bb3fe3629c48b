# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings of all hosts, and the plan made from them; the reasoning is in module_utils/_plan/planner.py."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.utils.display import Display

from ...module_utils._contract.findings import PlanError, finding
from ...module_utils._contract.plan import Conversations, Given, Here
from ...module_utils._contract.probe import Measured
from ...module_utils._contract.settings_table import ALIASES, NOT_SETTINGS, RunSettings
from ...module_utils._kit.printable import printable
from ...module_utils._plan import budget, planner, stages
from ...module_utils._plan.text import by_hand, render
from ...module_utils._plan.trainings import so_far
from ...module_utils._probe.machine import disk
from ...module_utils._probe.sources import folder_facts
from ...module_utils._rules import messages
from .. import _configuration
from .._agent.carrier import Call
from .._display.texts import finding_text
from .._runs import command_on, is_local, whole_path
from .kept import keep

display = Display()
# Default conversations for fine-tuning.
DEMO = Path(__file__).resolve().parents[3] / "trainer" / "data" / "conversations.jsonl"


def read_questions(call: Call, hosts: Sequence[str], tolerant: bool = False) -> dict[str, object]:
    """The options of host_info for each host."""
    asked = given(call, hosts)
    refuse_limit(call, hosts, tolerant)
    # Every task would be root, which only a variable of the command line could make it.
    if boolean(call.variables.get("ansible_become") or False, strict=False):
        seen = "ansible_become is true for all tasks, so training would run as root"
        remedy = "Leave it out: the tasks that need root become root by themselves (-K asks for the password)."
        raise PlanError([finding("setting-refused", "", seen, remedy=remedy)])
    # Printed once by the first play: settings that no play can make.
    if lacking := _configuration.lacking(len(hosts)):
        display.display(lacking, stderr=True)
    return {"questions": planner.questions(asked)}


def make_plan(
    call: Call,
    hosts: Sequence[str],
    tolerant: bool = False,
    measured: Mapping[str, Mapping[str, Measured]] | None = None,
    show: str = "none",
    file: str | None = None,
) -> dict[str, object]:
    """The plan; measured: what keep_measured returned for each host."""
    asked = given(call, hosts)
    refuse_limit(call, hosts, tolerant)
    run = planner.read(asked).run
    here = seen_on_the_controller(run)
    # Recorded at the first plan of this play, because set-up counts towards the budget.
    began = (call.variables.get("ddp_launched") or {}).get("begun") or time.time()
    kept = {host: found["measured"] for host, found in (measured or {}).items()}
    outcome = planner.make_plan(asked, tolerant, here, kept, time.time(), began)
    plan, training = outcome.plan, outcome.training
    fit = budget.render(outcome.budget, training.get("ends")) if outcome.budget else ""
    whole, brief = (
        "\n\n".join(filter(None, [render(plan, outcome.text_bytes, details), fit])) for details in (True, False)
    )
    told = {"plan": plan, "findings": outcome.findings}
    by_show = {"text": brief, "whole": f"{whole}\n\n{by_hand(plan)}", "budget": fit, "json": json.dumps(told, indent=2)}
    if text := by_show.get(show):
        display.display(printable(f"\n{text}\n"))
    # The collection's display shows findings by itself.
    if show in ("text", "whole") and outcome.findings and not _configuration.display_is_ours():
        display.display(printable("\n".join(map(finding_text, outcome.findings))) + "\n")
    probes = {host["name"]: host.get("probe") for host in asked}
    # Drawn here, because planning must be deterministic.
    drawn = {"id": training["id"] or secrets.token_hex(8), "begun": training["begun"] or int(time.time())}
    return {
        "changed": keep(file, told, "The plan", check=call.check),
        **told,
        # Of the controller's own work, which is not part of the plan.
        "controller": {"watch": run.watch, "results_dir": whole_path(run.results_dir), "fresh": run.fresh},
        "training": {**training, **drawn},
        "so_far": so_far(plan["digest"], probes, run.fresh),
        "text": whole,
    }


def seen_on_the_controller(run: RunSettings) -> Here:
    """Files and folders of the settings on the controller."""
    results, paths = whole_path(run.results_dir), run.data_paths if run.data_source == "controller" else ()
    here: Here = {"folders": {path: folder_facts(path) for path in paths}, "obstacles": []}
    if not disk(results)["writable"]:
        seen = f"ddp_results_dir is {run.results_dir}, which is not writable on the controller ({results})"
        here["obstacles"].append(finding("results-read-only", "", seen))
    if run.stage == stages.SFT:
        here["conversations"] = conversations(here, "ddp_sft_data", run.sft_data or str(DEMO))
        if run.sft_val_data:
            here["held_out"] = conversations(here, "ddp_sft_val_data", run.sft_val_data)
    return here


def conversations(here: Here, setting: str, named: str) -> Conversations:
    """A file of conversations; what is wrong with it is an obstacle."""
    path = Path(whole_path(named))
    told: Conversations = {"path": str(path), "sha256": None, "count": 0}
    try:
        found, wrong = messages.scan(path)
        told = {**told, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "count": len(found)}
        problem = messages.summary(wrong)
    except OSError as error:
        problem = f"{path} cannot be read on the controller: {error.strerror or error}"
    if problem:
        here["obstacles"].append(finding("source-missing", "", f"{setting}: {problem}"))
    return told


def refuse_limit(call: Call, hosts: Sequence[str], tolerant: bool) -> None:
    """Refuse --limit, which would leave out ranks, except for looking at a run or stopping it."""
    playing = call.variables.get("ansible_play_hosts_all")
    left_out = [host for host in hosts if playing is not None and host not in playing]
    if left_out and not tolerant:
        seen = (
            f"{', '.join(left_out)} is excluded by --limit, but a run needs all its hosts; "
            f"run without --limit, or select the run's hosts with -e target={','.join(playing or [])}"
        )
        raise PlanError([finding("setting-refused", left_out[0], seen)])


def given(call: Call, hosts: Sequence[str]) -> list[Given]:
    """Settings of every host, and its probe if it was probed."""
    found: list[Given] = []
    for name in hosts:
        known = call.variables["hostvars"].get(name)
        if known is None:
            raise PlanError([finding("setting-refused", name, f"{name} is not a host of the inventory")])
        # The facts of earlier steps hold all hosts: reading them for each would grow with the square of their number.
        named = [key for key in known if (key.startswith("ddp_") and key not in NOT_SETTINGS) or key in ALIASES]
        settings = {}
        for key in named:
            try:
                settings[key] = known[key]
            except AnsibleError as error:
                seen = f"{key} of {name} cannot be evaluated: {error}"
                raise PlanError([finding("setting-refused", name, seen.rstrip("."))]) from error
        host: Given = {
            "name": name,
            "settings": settings,
            "probe": known.get("ddp_probe"),
            "error": known.get("ddp_probe_error") or None,
            # The name or address at which other hosts would reach it; unknown for a local connection.
            "reach": None if is_local(known) else str(known.get("ansible_host") or name),
            "login": command_on(name, known),
        }
        found.append(host)
    return found
