# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings before there is a plan, the plan's questions to hosts and controller, and what the controller's answers prevent."""

from __future__ import annotations

import os
from typing import Iterator, Sequence

from .._contract.findings import Finding, finding
from .._contract.plan import ControllerQuestion, Given, Here
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
    """Questions to the controller: folders and files in the settings, and the results folder."""
    run = read(hosts).run
    fine_tunes = run.stage == stages.SFT
    return {
        "folders": [*(run.data_paths if run.data_source == "controller" else [])],
        "results": run.results_dir,
        "conversations": (run.sft_data or "") if fine_tunes else None,
        "held_out": run.sft_val_data if fine_tunes else None,
    }


def controller_settings(run: RunSettings) -> dict[str, object]:
    """Settings of the controller's own work, which are not part of the document."""
    return {"watch": run.watch, "results_dir": run.results_dir, "fresh": run.fresh}


def controller_findings(run: RunSettings, here: Here) -> Iterator[Finding]:
    """A problem with the results that a start would meet only later."""
    if folder := here.get("read_only"):
        where = f"which is not writable on the controller ({folder})"
        yield finding("results-read-only", "", f"ddp_results_dir is {run.results_dir}, {where}")
