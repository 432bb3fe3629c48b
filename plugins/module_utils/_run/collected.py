# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a collected run: one folder per host."""

from __future__ import annotations

import os
import re
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import (
    Document,
    items,
    number,
    section,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.keeper_states import TRAINING
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import TRAINING_FILE
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import newest_model
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log_tail import log_lines
from ansible_collections.nanochat.ddp.plugins.module_utils._run.members import read_members
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import Event, finite, parse_events
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import read_run


class ReportError(Exception):
    """There is nothing to report; the text is for the user."""


class Rank(NamedTuple):
    """The collected files of one host."""

    host: str
    rank: int
    events: List[Event]
    session: Document
    lines: List[str]
    members: Sequence[Document] = ()  # recorded by its keeper
    training: Optional[Document] = None


class Run(NamedTuple):
    """The collected files of a run."""

    name: str
    plan: Document
    ranks: List[Rank]
    prediction: Document
    findings: List[Document]
    members: Sequence[Document] = ()  # records of the keeper that trained most often


def load_rank(folder: str, plan: Document) -> Optional[Rank]:
    """One host's folder; None if it contains nothing about a run."""
    found = (re.match(r"metrics-rank(\d+)\.jsonl$", name) for name in sorted(os.listdir(folder)))
    metrics = {int(match.group(1)): os.path.join(folder, match.group(0)) for match in found if match}
    session = read_object(os.path.join(folder, "session.json"))
    if not metrics and not session:
        return None
    # A host whose rank changed has files of both; the newest start decides.
    host = os.path.basename(folder)
    planned = [number(node, "rank") for node in items(plan, "nodes") if folder_name(node) == host]
    named = re.search(r"-rank(\d+)$", str(session.get("session") or ""))
    rank = planned[0] if planned else int(named.group(1)) if named else min(metrics, default=0)
    rank = rank if rank in metrics else min(metrics, default=rank)
    events: List[Event] = []
    if rank in metrics and os.path.isfile(metrics[rank]):
        with open(metrics[rank], "rb") as stream:
            events = parse_events(stream.read())
    lines = log_lines(os.path.join(folder, "log", "rank%d.log" % rank), 200)
    training = read_object(os.path.join(folder, TRAINING_FILE))
    return Rank(host, rank, events, session, lines, read_members(folder), training)


def folder_name(node: Document) -> str:
    """Folder for files collected from a host."""
    return str(node.get("host")).replace("/", "_")


def collected_model(results: str, run: str = "") -> Optional[str]:
    """The collected folder with the newest checkpoint of the newest training, of a given run or of the one started
    last."""
    named = [run] if run else _names(results)
    folders = [os.path.join(results, name, host) for name in named for host in _names(os.path.join(results, name))]
    seen = [(folder, read_run(folder, lines=0)) for folder in folders]
    having = [one for one in seen if one[1]["saved"] is not None]
    started = {os.path.dirname(folder): 0.0 for folder, dummy in having}
    for folder, told in having:
        started[os.path.dirname(folder)] = max(started[os.path.dirname(folder)], told["started"] or 0.0)
    last = max(started, key=lambda place: started[place], default=None)
    found = newest_model((folder, dict(told)) for folder, told in having if os.path.dirname(folder) == last)
    return found.host if found else None


def _names(folder: str) -> List[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if os.path.isdir(folder) else []


def newest_plan(folders: Sequence[str]) -> Document:
    """The plan of the newest start of the newest training; folders of hosts that left keep an older one."""
    newest: Tuple[Tuple[int, float], Document] = ((-1, -1.0), {})
    for folder in folders:
        plan = read_object(os.path.join(folder, "plan.json"))
        started = finite(read_object(os.path.join(folder, "session.json")).get("started")) or 0.0
        order = (number(read_object(os.path.join(folder, TRAINING_FILE)), "number"), started)
        if plan and order > newest[0]:
            newest = (order, plan)
    return newest[1]


def load_run(path: str) -> Run:
    """A folder RUN/ with one folder per host."""
    if not os.path.isdir(path):
        raise ReportError("There is no folder %s. Check the run's name and that it was collected." % path)
    folders = sorted(entry.path for entry in os.scandir(path) if entry.is_dir())
    plan = newest_plan(folders)
    members = {folder_name(node) for node in items(plan, "nodes")}
    there = [folder for folder in folders if os.path.basename(folder) in members] or folders
    ranks = [rank for rank in (load_rank(folder, plan) for folder in there) if rank is not None]
    if not ranks:
        raise ReportError("No folder below %s has metrics or a session; collect the run first." % path)
    # The last rehearsal's prediction; collecting copies it if the results are elsewhere.
    rehearsal = read_object(os.path.join(path, "rehearsal.json"))
    prediction = section(rehearsal, "prediction") or read_object(os.path.join(path, "prediction.json"))
    by_rank = sorted(ranks, key=lambda rank: (rank.rank, rank.host))
    told = max(
        (one.members for one in ranks), key=lambda events: sum(event.get("what") == TRAINING for event in events)
    )
    return Run(os.path.basename(path.rstrip("/")), plan, by_rank, prediction, items(rehearsal, "findings"), told)
