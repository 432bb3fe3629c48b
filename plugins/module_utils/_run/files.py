# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists the files of a run folder to collect, each with the stamp by which the controller knows it again."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, TypedDict

from .._contract.run_folder import CHECKPOINTS, MEMBER_EVENTS, TOKENIZER, checkpoint_steps
from .find import find_run_dir

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
