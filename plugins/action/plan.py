# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of all hosts, computed once on the controller; the reasoning is in module_utils/_plan/planner.py."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible import constants
from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import finding
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Given
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import ALIASES, NOT_SETTINGS
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.questions import (
    PlanError,
    controller_questions,
    controller_settings,
    questions,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.so_far import so_far
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.text import (
    as_json,
    render,
    render_findings,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.sources import look
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.checkout import problems as checkout_problems
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _configuration
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _conversations as conversations
from ansible_collections.nanochat.ddp.plugins.plugin_utils._judging import JudgingAction

display = Display()
REQUIREMENTS = Path(__file__).parents[2] / "trainer" / "requirements.txt"


class ActionModule(JudgingAction):
    """Reads the settings and probes of every host, and returns the plan."""

    OPTIONS: ClassVar[dict[str, dict[str, object]]] = {
        "hosts": {"type": "list", "elements": "str", "required": True},
        "stage": {"type": "str", "choices": ["settings", "questions", "plan"], "default": "plan"},
        "tolerant": {"type": "bool", "default": False},
        "show": {"type": "str", "choices": ["text", "json", "none"], "default": "none"},
        "file": {"type": "path"},
    }

    def judge(self, options: Mapping[str, Any], task_vars: Mapping[str, Any]) -> dict[str, object]:
        """The plan, or what stands against it."""
        try:
            hosts = [host_of(name, task_vars) for name in options["hosts"]]
            if options["stage"] == "settings":
                return {"controller": controller_settings(hosts)}
            refuse_limit(options["hosts"], task_vars.get("ansible_play_hosts_all"), options["tolerant"])
            if options["stage"] == "questions":
                tell_what_is_lacking(len(hosts))
                return {"questions": questions(hosts)}
            asked = controller_questions(hosts)
            # A repository may take its time to answer, and looking at a run or stopping it needs none.
            here = look({**asked, "git": None} if options["tolerant"] else asked, os.environ)
            if asked["trainer"]:
                here["checkout"] = checkout_problems(asked["trainer"], asked["flags"], asked["script"])
            if asked["conversations"] is not None:
                here["conversations"] = conversations.facts(asked["conversations"], os.environ)
            if asked["held_out"] is not None:
                here["held_out"] = conversations.facts(asked["held_out"], os.environ)
            outcome = make_plan(hosts, requirements(), options["tolerant"], here)
        except PlanError as error:
            return {"failed": True, "msg": str(error), "problems": error.findings}
        text = render(outcome.plan)
        probes = {host["name"]: host.get("probe") for host in hosts}
        document = json.dumps(as_json(outcome.plan, outcome.findings), indent=2) + "\n"
        if options["show"] == "json":
            display.display(document)
        elif options["show"] == "text":
            display.display(f"\n{text}\n")
            # The progress display of this collection shows findings by itself.
            if constants.DEFAULT_STDOUT_CALLBACK != _configuration.STORY and outcome.findings:
                display.display(render_findings(outcome.findings) + "\n")
        return {
            "changed": self.write(options["file"], document),
            "plan": outcome.plan,
            "ranks": {node["host"]: node["rank"] for node in outcome.plan["nodes"]},
            "findings": outcome.findings,
            "controller": outcome.controller,
            # Drawn here, as the same job has the same plan tomorrow.
            "training": {
                **outcome.training,
                "id": outcome.training["id"] or secrets.token_hex(8),
                "begun": outcome.training["begun"] or int(time.time()),
            },
            "so_far": so_far(outcome.plan["digest"], probes, bool(outcome.controller["fresh"])),
            "text": text,
        }

    def write(self, path: str | None, document: str) -> bool:
        """Keep the plan in a file of the controller; whether that changes anything."""
        if not path:
            return False
        file = Path(path)
        try:
            if file.exists() and file.read_text(encoding="utf-8") == document:
                return False
            if not self._task.check_mode:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(document, encoding="utf-8")
        except OSError as error:
            raise AnsibleError(
                f"The plan could not be written to {path} on the controller: {error.strerror}."
            ) from None
        return True


def tell_what_is_lacking(hosts: int) -> None:
    """Said once by the first play: what no play can set."""
    said = _configuration.lacking(hosts, _configuration.forks(), _configuration.display_is_chosen())
    if said:
        display.display(said, stderr=True)


def refuse_limit(hosts: list[str], playing: list[str] | None, tolerant: bool) -> None:
    """With --limit the other ranks would be missing; only looking at a run and stopping it make sense then."""
    left_out = [host for host in hosts if playing is not None and host not in playing]
    if left_out and not tolerant:
        seen = (
            f"{', '.join(left_out)} is left out by --limit, but a run is of all its hosts; "
            f"run without --limit, or name the run's hosts in its place: -e target={','.join(playing or [])}"
        )
        raise PlanError([finding("setting-refused", left_out[0], seen)])


def host_of(name: str, variables: Mapping[str, Any]) -> Given:
    """What make_plan wants to know of one host: its settings, and its probe if it was probed."""
    known = variables["hostvars"].get(name)
    if known is None:
        raise PlanError([finding("setting-refused", name, f"{name} is not a host of the inventory")])
    # The facts of earlier steps hold all hosts: reading them for each would grow with the square of their number.
    named = [key for key in known if (key.startswith("ddp_") and key not in NOT_SETTINGS) or key in ALIASES]
    settings = {key: value_of(name, known, key) for key in named}
    return {
        "name": name,
        "settings": settings,
        "probe": known.get("ddp_probe"),
        "error": known.get("ddp_probe_error") or None,
        "reach": reach(name, known),
    }


def reach(name: str, known: Mapping[str, Any]) -> str | None:
    """By which name or address the other hosts would try this one; a local connection says nothing about that."""
    if known.get("ansible_connection") in ("local", "ansible.builtin.local"):
        return None
    return str(known.get("ansible_host") or name)


def value_of(host: str, known: Mapping[str, Any], name: str) -> Any:
    try:
        return known[name]
    except AnsibleError as error:
        seen = f"{name} of {host} cannot be worked out: {error}"
        raise PlanError([finding("setting-refused", host, seen.rstrip("."))]) from error


def requirements() -> list[str]:
    """The pinned packages of this collection's trainer."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
