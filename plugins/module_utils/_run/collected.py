# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a collected run: one folder per host. Its files come from hosts, so what does not fit their types is left out, with a sentence."""

from __future__ import annotations

import os
import re
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypedDict, cast

from .._contract.decode import decode
from .._contract.document import Document, items, number
from .._contract.plan import Plan
from .._contract.probe import PastSession
from .._contract.run_folder import MEMBER_EVENTS, TRAINING_FILE
from .._contract.validate import InvalidHostData
from .._kit.files import paths_in, read_bytes, read_object
from .._kit.words import plural
from .find import find_rank
from .health import Health, Seen
from .members import TAIL_BYTES
from .metrics import finite, json_lines, parse_events, read_tail
from .state import Records, RunState, describe, log_lines


class ReportError(Exception):
    """There is nothing to report; the text is for the user."""


class MetricsEvent(TypedDict):
    """The keys of every line of a rank's metrics."""

    kind: str
    time: Optional[float]
    step: Optional[int]


class MemberEvent(TypedDict):
    """The keys of every line of a keeper's members.jsonl."""

    what: str
    time: float
    generation: Optional[int]


class CollectedRank(NamedTuple):
    """The collected files of one host, and what they say."""

    host: str
    files: Records
    run: RunState


class CollectedRun(NamedTuple):
    """The collected files of a run."""

    name: str
    plan: Document
    ranks: List[CollectedRank]
    rehearsal: Document  # the last one's findings and prediction
    problems: Sequence[str] = ()  # sentences about what was left out of its hosts' files
    former: Sequence[CollectedRank] = ()  # of hosts that are no longer in the plan

    @property
    def health(self) -> Health:
        """Its hosts together."""
        return Health(Seen(rank.host, rank.run) for rank in self.ranks)


def fitting(
    kind: Any, found: Iterable[Document], path: str, problems: List[str], partial: bool = False
) -> List[Document]:
    """The documents of a host's file that fit their type; a sentence about the others is added to the problems."""
    fits, reasons = [], []
    for one in filter(None, found):
        try:
            fits.append(cast(Document, decode(kind, one, partial)))
        except InvalidHostData as why:
            reasons.append(str(why))
    if reasons:
        folder, name = os.path.split(path)
        what = "%s of its %s" % (plural(len(reasons), "line"), name) if name.endswith(".jsonl") else "its " + name
        problems.append("%s: left out %s: %s" % (os.path.basename(folder), what, reasons[0]))
    return fits


def file_of(kind: Any, path: str, problems: List[str], partial: bool = False) -> Document:
    """The document in a host's file; empty if there is none or it does not fit."""
    return next(iter(fitting(kind, [read_object(path)], path, problems, partial)), {})


def load_rank(folder: str, plan: Document, problems: List[str]) -> Optional[CollectedRank]:
    """One host's folder; None if it contains nothing about a run."""
    found = (re.match(r"metrics-rank(\d+)\.jsonl$", name) for name in os.listdir(folder))
    metrics = {int(match.group(1)): os.path.join(folder, match.group(0)) for match in found if match}
    host = os.path.basename(folder)
    session = file_of(PastSession, os.path.join(folder, "session.json"), problems)
    if not metrics and not session:
        return None
    # A host whose rank changed has files of both; the newest start decides.
    planned = [number(node, "rank") for node in items(plan, "nodes") if host_folder(node.get("host")) == host]
    rank = planned[0] if planned else find_rank(folder, {}, session) or 0
    rank = rank if rank in metrics else min(metrics, default=rank)
    events = parse_events(read_bytes(metrics[rank])) if rank in metrics else []
    kept = os.path.join(folder, MEMBER_EVENTS)
    files = Records(
        run_dir=folder,
        rank=rank,
        plan=plan,
        session=session,
        heartbeat={},
        training=read_object(os.path.join(folder, TRAINING_FILE)),
        events=fitting(MetricsEvent, events, metrics.get(rank, ""), problems),
        members=fitting(MemberEvent, json_lines(read_tail(kept, TAIL_BYTES)), kept, problems),
        member={},
        lines=log_lines(os.path.join(folder, "log", "rank%d.log" % rank), 200),
    )
    return CollectedRank(host, files, describe(files, bool(session) and session.get("ended") is None))


def host_folder(host: object) -> str:
    """The folder for files collected from a host, below that of the run."""
    return str(host).replace("/", "_")


def newest_plan(folders: Sequence[str], problems: List[str]) -> Document:
    """The plan of the newest start of the newest training; folders of hosts that left keep an older one."""
    found: List[Tuple[int, float, Document]] = []
    for folder in folders:
        plan = file_of(Plan, os.path.join(folder, "plan.json"), problems, partial=True)
        started = finite(read_object(os.path.join(folder, "session.json")).get("started")) or 0.0
        found += [(number(read_object(os.path.join(folder, TRAINING_FILE)), "number"), started, plan)] if plan else []
    return max(found, key=lambda one: one[:2], default=(0, 0.0, {}))[2]


def load_run(path: str) -> CollectedRun:
    """A folder RUN/ with one folder per host."""
    if not os.path.isdir(path):
        raise ReportError("There is no folder %s. Check the run's name and that it was collected." % path)
    folders = list(filter(os.path.isdir, paths_in(path)))
    problems: List[str] = []
    plan = newest_plan(folders, problems)
    planned = {host_folder(node.get("host")) for node in items(plan, "nodes")}
    loaded = [rank for rank in (load_rank(folder, plan, problems) for folder in folders) if rank is not None]
    is_planned = not planned.isdisjoint(map(os.path.basename, folders))
    ranks = [rank for rank in loaded if not is_planned or rank.host in planned]
    if not ranks:
        raise ReportError("No folder below %s has metrics or a session; collect the run first." % path)
    name, rehearsal = os.path.basename(path.rstrip("/")), read_object(os.path.join(path, "rehearsal.json"))
    ranks.sort(key=lambda one: (one.files.rank, one.host))
    former = [rank for rank in loaded if is_planned and rank.host not in planned]
    return CollectedRun(name, plan, ranks, rehearsal, problems, former)
