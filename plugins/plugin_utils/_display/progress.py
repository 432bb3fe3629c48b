# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run's progress: a live line, or without a terminal a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from ansible import constants

from ...module_utils._kit.files import read_object, write_json
from ...module_utils._run.health import LOST, UNSEEN, Seen
from ...module_utils._run.live_line import live_line
from ...module_utils._run.state import RunState

LOOK_SECONDS = 40.0  # the longest wait for news, plus time to connect
QUIET_SECONDS = (2.0, 60.0)  # interval of progress lines without a terminal, at first and in a long run


def run_line(seen: Collection[Seen], width: int = 0, fancy: bool = True) -> str:
    """The run's position in the available width; without a width all of it."""
    away = sorted(one.host for one in seen if one.silent and one.verdict in (None, LOST))
    tail = f"  ({', '.join(away)} does not answer)" if away else ""
    room = max(20, width - len(tail)) if width else 0
    return live_line(list(seen), room, unicode=fancy) + tail


def is_due(line: str, before: str, since: float, begun: float) -> bool:
    """Whether to print a permanent line: it is news, and the last one was a while ago."""
    now = time.monotonic()
    return line != before and now - since >= min(QUIET_SECONDS[1], max(QUIET_SECONDS[0], (now - begun) / 10))


class WatchEntry(TypedDict, total=False):
    """State of a host's loop: the last answer, and the times of the last changes by a clock that stops while this machine sleeps."""

    begun: float
    asked: float
    seen: float
    run: RunState
    silent_since: float
    worked: float
    ended_since: float
    over: str


def seen_by(host: str, entry: WatchEntry, now: float) -> Seen:
    """A ledger entry as input of the judgement."""
    asked = now - entry.get("asked", now)
    return Seen(
        host,
        entry.get("run") or UNSEEN,
        age=now - entry.get("begun", now),
        looked=now - entry.get("seen", now),
        # A loop may still be waiting this long for a frozen host's answer.
        silent=now - entry["silent_since"] if entry.get("silent_since") else max(0.0, asked - LOOK_SECONDS),
        without_cpu=now - entry["worked"] if entry.get("worked") else math.inf,
        ended=now - entry["ended_since"] if entry.get("ended_since") else 0.0,
        verdict=entry.get("over"),
    )


class Ledger:
    """Files by which the processes of a playbook run share their hosts' state, in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Mapping[str, object]) -> None:
        """Write a host's entry atomically."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> WatchEntry:
        """A host's entry; empty if there is none."""
        return cast(WatchEntry, read_object(str(self.path(host))))

    def seen(self) -> list[Seen]:
        """The hosts so far."""
        hosts = [bytes.fromhex(path.stem).decode() for path in sorted(self.folder.glob("*.json"))]
        return [seen_by(host, self.read(host), time.monotonic()) for host in hosts]

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, because inventory names may contain anything."""
        return self.folder / (host.encode().hex() + ".json")


def ledger_of(task: Any) -> Ledger:
    """That of a task that watches a run."""
    return Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"run-watch-{task._uuid}")
