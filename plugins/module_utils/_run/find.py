# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the run that a command means, its folder, this host's rank in it, and its files to collect, each with the stamp by which the
controller knows it again."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, TypedDict

from .._contract.document import Document, items, number
from .._contract.run_folder import CHECKPOINTS, MEMBER_EVENTS, TOKENIZER, checkpoint_steps, plain_run_name
from .._kit.files import paths_in

if TYPE_CHECKING:
    from .._contract.decode import Duration

SMALL = (
    "plan.json",
    "session.json",
    "training.json",
    MEMBER_EVENTS,
    "heartbeat-rank*.json",
    "metrics-rank*.jsonl",
    "log/*.log",
    "report/*",
)
CHECKPOINT_FILES = tuple("%s/*/%s" % (folder, name) for folder in CHECKPOINTS for name in ("model_*.pt", "meta_*.json"))
TOKENIZER_FILES = tuple("tokenizer/%s" % name for name in TOKENIZER)
# All that a host may send.
PATTERNS = (*SMALL, *CHECKPOINT_FILES, *TOKENIZER_FILES)


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


def find_run_dir(
    run_dir: Optional[str], base_dir: str, run: Optional[str] = None, with_model: bool = False
) -> Optional[str]:
    """The run folder that a verb's parameters select: run_dir, or run (or the newest) below base_dir, if any."""
    if run_dir or run:
        return run_dir or os.path.join(base_dir, "runs", plain_run_name(run))
    return newest_run(base_dir, with_model)


# -- the files to collect -----------------------------------------------------------------------------------------------


class RunFile(TypedDict):
    """A file below the run folder. While size and time are the same, so is the file."""

    path: str
    size: int
    mtime: Duration  # whole seconds since the epoch


def matches(path: str, patterns: Any) -> bool:
    """Whether a path relative to the run folder matches a pattern, level by level."""
    return any(path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern) for pattern in patterns)


def files_in(folder: str, patterns: Sequence[str]) -> List[str]:
    """Relative paths of the files that match, sorted."""
    places = (place for pattern in patterns for place in glob.glob(os.path.join(glob.escape(folder), pattern)))
    return sorted(os.path.relpath(place, folder) for place in places if os.path.isfile(place))


def newest_checkpoint(run_dir: str) -> List[str]:
    """The newest checkpoint's model and meta file. The meta file last: it tells that the model is there."""
    newest = checkpoint_steps(run_dir)[-1:]
    return sorted((path for path in files_in(run_dir, CHECKPOINT_FILES) if step_of(path) in newest), reverse=True)


def step_of(path: str) -> int:
    """The step in the name of a checkpoint's file; -1 if there is none."""
    found = re.search(r"(?:model|meta)_(\d+)\.(?:pt|json)$", path)
    return int(found.group(1)) if found else -1


def stamped(folder: str, path: str) -> Optional[RunFile]:
    """A file with its stamp; None if it is gone."""
    try:
        status = os.stat(os.path.join(folder, path))
    except OSError:
        return None
    return {"path": path, "size": status.st_size, "mtime": int(status.st_mtime)}


def run_files(
    base_dir: str = "", run_dir: Optional[str] = None, run: Optional[str] = None, checkpoints: bool = False
) -> Dict[str, object]:
    """The run (null if there is none) and its files; checkpoints: also those for a chat, the newest checkpoint and its tokenizer."""
    run_dir = find_run_dir(run_dir, base_dir, run)
    if run_dir is None or not os.path.isdir(run_dir):
        return {"run": None, "run_dir": run_dir, "files": []}
    newest = newest_checkpoint(run_dir) if checkpoints else []
    paths = [*files_in(run_dir, SMALL), *newest, *(files_in(run_dir, TOKENIZER_FILES) if newest else [])]
    found = [one for one in (stamped(run_dir, path) for path in paths) if one]
    return {"run": os.path.basename(run_dir.rstrip("/")), "run_dir": run_dir, "files": found}
