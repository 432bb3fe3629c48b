# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is settled before a plan: the settings of all hosts, and what the plan asks of the hosts and of the controller."""

from __future__ import annotations

import os
import re
from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings as settings_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding, refusal_text
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import (
    Controller,
    ControllerQuestion,
    Given,
    HostQuestion,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import Settings
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import command, source_checks, stages
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import Host


class PlanError(ValueError):
    """Why there is no plan: every problem, as findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__(refusal_text(self.findings))


def resolved(hosts: Sequence[Given]) -> tuple[Settings, dict[str, Settings]]:
    """(settings of the run, {host: its own settings})."""
    if not hosts:
        seen = "There are no hosts to plan for; the inventory's group of trainers is empty"
        raise PlanError([finding("setting-refused", "", seen)])
    try:
        run, each = settings_utils.resolve([(host["name"], host["settings"]) for host in hosts])
    except settings_utils.SettingsError as error:
        raise PlanError(error.findings) from error
    return stages.staged(run), each


def questions(hosts: Sequence[Given]) -> dict[str, HostQuestion]:
    """What to ask each host for its probe: {host: the options of host_info}. Refuses wrong settings before any host is asked.

    Hosts have the form {name, settings, reach}; reach is how others would call the host, None where that is only this machine.
    """
    run, each = resolved(hosts)
    known = [Host(host["name"], each[host["name"]], {}) for host in hosts]
    addresses = {host["name"]: each[host["name"]]["ddp_address"] or host.get("reach") for host in hosts}
    asked: dict[str, HostQuestion] = {}
    for host in hosts:
        own = each[host["name"]]
        asked[host["name"]] = {
            "base_dir": own["ddp_base_dir"],
            "run_dir": os.path.join(own["ddp_base_dir"], "runs", stages.run_name(run)),
            "base_run": stages.base_name(run) if run["ddp_stage"] != stages.BASE else None,
            "venv_dir": own["ddp_venv_dir"],
            "python": own["ddp_python"],
            "ports": [run["ddp_port"], *command.keeper_ports(run, len(known))],
            "folders": source_checks.folders_of(run, known, host["name"]),
            "peers": [address for other, address in addresses.items() if address and other != host["name"]],
        }
    return asked


def controller_questions(hosts: Sequence[Given]) -> ControllerQuestion:
    """What the plan wants to know of the controller: folders and a repository that the settings name, and where results go."""
    run, dummy = resolved(hosts)
    source, is_here = str(run["ddp_trainer_source"]), run["ddp_data_source"] == "controller"
    git = source if source != "ours" and is_git(source) else None
    trainer = None if source == "ours" or git else source
    folders: list[str] = [*(run["ddp_data_paths"] if is_here else []), *([trainer] if trainer else [])]
    fine_tunes = run["ddp_stage"] == stages.SFT and source == "ours"
    return {
        "folders": folders,
        "git": git,
        "trainer": trainer,
        "script": stages.SCRIPTS[run["ddp_stage"]],
        "flags": [] if source == "ours" else command.flag_names(run, command.choose(run, ())),
        "results": run["ddp_results_dir"],
        "conversations": (run["ddp_sft_data"] or "") if fine_tunes else None,
        "held_out": run["ddp_sft_val_data"] if fine_tunes else None,
    }


def controller_settings(hosts: Sequence[Given]) -> Controller:
    """Settings of what the controller itself does, for what needs no plan. Refuses wrong settings; hosts are as for `questions`."""
    return of_controller(resolved(hosts)[0])


def of_controller(run: Mapping[str, Any]) -> Controller:
    """They are no part of the document."""
    return {
        "watch": run["ddp_watch"],
        "stall_factor": run["ddp_stall_factor"],
        "results_dir": run["ddp_results_dir"],
        "collect_checkpoints": run["ddp_collect_checkpoints"],
        "strict": run["ddp_strict"],
        "fresh": run["ddp_fresh"],
    }


def is_git(source: str) -> bool:
    return bool(re.match(r"(https?|git|ssh|file)://|git@|[\w.-]+@[\w.-]+:", source)) or source.endswith(".git")
