# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the run that a command means, its folder, and this host's rank in it."""

from __future__ import annotations

import os
import re
from typing import Iterable, NamedTuple, Optional, Tuple

from .._contract.document import Document, items, number, section, text
from .._contract.run_folder import checkpoint_steps, plain_run_name
from .._kit.files import paths_in
from .metrics import finite


def newest_run(base_dir: str, with_model: bool = False) -> Optional[str]:
    """The run folder below a base folder that was written to last, or of those with a checkpoint; None if there is none."""
    folders = [path for path in paths_in(os.path.join(base_dir, "runs")) if os.path.isdir(path)]
    return max((path for path in folders if not with_model or checkpoint_steps(path)), key=_written, default=None)


def _written(run_dir: str) -> Tuple[bool, float]:
    """Whether the run was ever launched (until then its folder holds data alone), and when its output was last written."""
    output = ("session.json", "plan.json", "metrics-", "heartbeat-")
    written = [path for path in paths_in(run_dir) if os.path.basename(path).startswith(output)]
    return bool(written), max(map(_mtime, written or [run_dir]))


def _mtime(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0.0


def find_rank(run_dir: str, plan: Document, session: Document) -> Optional[int]:
    """This host's rank: from its session's name, its files or its folder in the plan."""
    match = re.search(r"-rank(\d+)$", str(session.get("session") or ""))
    if match:
        return int(match.group(1))
    names = map(os.path.basename, paths_in(run_dir))
    ranks = (re.match(r"(?:metrics|heartbeat)-rank(\d+)\.json", name) for name in names)
    found = {int(match.group(1)) for match in ranks if match}
    if len(found) == 1:
        return found.pop()
    nodes = [node for node in items(plan, "nodes") if node.get("run_dir") == run_dir]
    return number(nodes[0], "rank") if len(nodes) == 1 and "rank" in nodes[0] else None


class FoundModel(NamedTuple):
    """A host with the wanted model, and its location."""

    host: str
    run: str
    run_dir: str


def one_run(seen: Iterable[Tuple[str, Document]]) -> Optional[str]:
    """The one run that a command means on all hosts: the one started last."""
    named = [run for dummy, run in seen if text(run, "run")]
    return text(max(named, key=lambda run: finite(run.get("started")) or 0.0), "run") if named else None


def age(run: Document) -> Tuple[int, float]:
    """Sort key: the newest training last; within a training, the last start last."""
    return number(section(run, "training"), "number"), finite(run.get("started")) or 0.0


def newest_model(seen: Iterable[Tuple[str, Document]]) -> Optional[FoundModel]:
    """The host with the newest checkpoint of the newest training; a fine-tuned model before its base."""

    def order(one: Tuple[str, Document]) -> Tuple[bool, int, int, int]:
        run = one[1]
        training = number(section(run, "training"), "number")
        return str(run["run"]).endswith("-sft"), training, number(run, "saved"), -number(run, "rank")

    having = [(host, run) for host, run in seen if run.get("saved") is not None and run.get("run_dir")]
    if not having:
        return None
    host, run = max(having, key=order)
    return FoundModel(host, str(run["run"]), str(run["run_dir"]))


def find_run_dir(
    run_dir: Optional[str], base_dir: str, run: Optional[str] = None, with_model: bool = False
) -> Optional[str]:
    """The run folder that a verb's parameters select: run_dir, or run (or the newest) below base_dir, if any."""
    if run_dir or run:
        return run_dir or os.path.join(base_dir, "runs", plain_run_name(run))
    return newest_run(base_dir, with_model)
