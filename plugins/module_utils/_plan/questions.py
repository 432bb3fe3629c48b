# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings before there is a plan, the plan's questions to hosts and controller, and what the controller's answers prevent."""

from __future__ import annotations

import os
import re
from typing import Iterator, Sequence

from .._contract.findings import Finding, finding
from .._contract.findings_table import WARNING
from .._contract.plan import ControllerQuestion, Given, Here, Trainer
from .._contract.settings import Asked, resolve
from .._contract.settings_table import RunSettings
from . import command, data_set, stages
from .decided import decide_restarts
from .hosts import Host


def read(hosts: Sequence[Given]) -> Asked:
    """The job's settings; rejects invalid ones."""
    return resolve([(host["name"], host["settings"]) for host in hosts])


def questions(hosts: Sequence[Given]) -> dict[str, dict[str, object]]:
    """host_info options for each host: {host: options}. Rejects invalid settings before any host is contacted.

    Hosts have the form {name, settings, reach}; reach is how others would address the host, None for this machine.
    """
    asked = read(hosts)
    run, each = asked.run, asked.hosts
    known = [Host(host["name"], each[host["name"]], {}) for host in hosts]
    addresses = {host["name"]: each[host["name"]].address or host.get("reach") for host in hosts}
    ports = [run.port, *(command.keeper_ports(run, len(known)) if decide_restarts(asked) else [])]
    return {
        name: {
            "base_dir": own.base_dir,
            "run_dir": os.path.join(own.base_dir, "runs", stages.run_name(run)),
            "base_run": stages.base_name(run) if run.stage != stages.BASE else None,
            "venv_dir": own.venv_dir,
            "python": own.python,
            "ports": ports,
            "folders": data_set.folders_of(run, known, name),
            "peers": [address for other, address in addresses.items() if address and other != name],
        }
        for name, own in each.items()
    }


def controller_questions(hosts: Sequence[Given]) -> ControllerQuestion:
    """Questions to the controller: folders and a repository in the settings, and the results folder."""
    run = read(hosts).run
    source = run.trainer_source
    git = source if source != "ours" and is_git(source) else None
    trainer = None if source == "ours" or git else source
    fine_tunes = run.stage == stages.SFT and source == "ours"
    return {
        "folders": [*(run.data_paths if run.data_source == "controller" else []), *([trainer] if trainer else [])],
        "git": git,
        "results": run.results_dir,
        "conversations": (run.sft_data or "") if fine_tunes else None,
        "held_out": run.sft_val_data if fine_tunes else None,
    }


def controller_settings(run: RunSettings) -> dict[str, object]:
    """Settings of the controller's own work, which are not part of the document."""
    return {"watch": run.watch, "results_dir": run.results_dir, "fresh": run.fresh}


def controller_findings(run: RunSettings, planned: Trainer, here: Here) -> Iterator[Finding]:
    """Problems with the trainer's source and the results that a start would meet only later, and the trainer's commit."""
    yield from trainer_source(run, planned, here)
    yield from trainer_commit(run.trainer_source, here)
    if folder := here.get("read_only"):
        where = f"which is not writable on the controller ({folder})"
        yield finding("results-read-only", "", f"ddp_results_dir is {run.results_dir}, {where}")


def trainer_source(run: RunSettings, planned: Trainer, here: Here) -> Iterator[Finding]:
    """Whether the controller has the trainer's source."""
    source = run.trainer_source
    facts = here.get("folders", {}).get(source) if planned["source"] == "path" else None
    problem = here.get("git", "") if planned["source"] == "git" else ""
    if facts and facts["kind"] != "folder":
        problem = f"{facts['path']} is not a folder on the controller"
    elif facts and not facts["trainer"]:
        problem = f"{facts['path']} on the controller has no scripts/base_train.py, so it is not a nanochat checkout"
    if problem:
        yield finding("source-missing", "", f"ddp_trainer_source is {source}, but {problem}")


def trainer_commit(source: str, here: Here) -> Iterator[Finding]:
    """The commit in use of a repository, which is cloned only once."""
    used, newest = (str((here.get("commits") or {}).get(name) or "")[:10] for name in ("used", "newest"))
    seen = f"ddp_trainer_source is {source}"
    if used and newest and used != newest:
        seen += f", and the controller uses its commit {used}; the repository now has {newest}"
        yield finding("trainer-commit", "", seen, severity=WARNING)
    elif used:
        yield finding("trainer-commit", "", f"{seen}, at commit {used}")


def is_git(source: str) -> bool:
    return bool(re.match(r"(https?|git|ssh|file)://|git@|[\w.-]+@[\w.-]+:", source)) or source.endswith(".git")
