# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings about other processes on a host: other trainings, and holders of a port that the run needs."""

from __future__ import annotations

from typing import Sequence, Union

from .._contract.findings import Finding, finding
from .._contract.probe import PortHolder, TrainingProcess
from .._kit.processes import is_check

Process = Union[PortHolder, TrainingProcess]
LONGEST_COMMAND = 90
MOST_NAMED = 3


def port_held(host: str, setting: str, holder: PortHolder) -> Finding:
    """A port is taken, with the remedy for its holder: stop a run, wait for a check."""
    port, pid = holder["port"], holder.get("pid")
    seen = f"{setting} {port} is taken on {host}"
    another = f"choose another port: -e {setting}={port + 10}"
    if is_check(holder.get("command")):
        seen += f" by a preflight check of {holder.get('user')} (process {pid})"
        remedy = f"Another controller is testing connections there. Try again when it has finished, or {another}"
    elif is_ours(holder):
        seen += f": {described(holder)}"
        remedy = f"{how_to_stop(holder)}; or {another}"
    elif pid:
        seen += f" by {described(holder)}"
        remedy = f"On {host}: kill {pid} if nobody needs it, or {another}"
    else:
        seen += f" by a process of {holder.get('user') or 'another user'}, which this user may not inspect"
        remedy = another[0].upper() + another[1:]
    return finding("port-held", host, seen, remedy=remedy, facts={"pids": [pid] if pid else []})


def other_training(host: str, strangers: Sequence[TrainingProcess]) -> Finding:
    """Others train on the host; names the first few."""
    pids = {one["pid"] for one in strangers}
    top = [one for one in strangers if one.get("parent") not in pids]
    named = list(dict.fromkeys(described(one) for one in top))
    seen = ", ".join(named[:MOST_NAMED]) + (f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else "")
    stops = dict.fromkeys(how_to_stop(one) for one in top)
    remedy = f"{'. '.join(stops)}; or wait until it ends." if all(is_ours(one) for one in top) else None
    return finding("other-training", host, seen, remedy=remedy, facts={"pids": [one["pid"] for one in top]})


def is_ours(process: Process) -> bool:
    """Whether this collection started it, for any run."""
    return bool(process.get("session") or process.get("run"))


def described(process: Process) -> str:
    """A process as text: its run if known, or its command."""
    if process.get("run"):
        return f"the run {process['run']} of {process['user']} trains there (process {process['pid']})"
    what = "another run of nanochat.ddp, " if is_ours(process) else ""
    command = process["command"] or ""
    command = command if len(command) <= LONGEST_COMMAND else command[: LONGEST_COMMAND - 3] + "..."
    return f"{what}process {process['pid']} of {process['user']} ({command})"


def how_to_stop(process: Process) -> str:
    run = process.get("run") or "NAME"
    return f"Stop it as {process['user']}: ansible-playbook nanochat.ddp.stop -i INVENTORY -e ddp_run={run}"
