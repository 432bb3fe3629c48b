# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds and removes a job's files below a base folder: only files with our marks, and nothing while anything there is alive."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

from .._contract.document import words
from .._contract.run_folder import (
    DEPLOYED,
    MANIFEST,
    MEASURED,
    PLAN,
    PYTHON_FOLDER,
    PYTHON_MARK,
    RUN_NAME,
    SESSION,
    SESSION_FILES,
    WHEELS,
    plain_run_name,
)
from .._kit import processes
from .._kit.files import paths_in, read_bytes, read_object
from .._kit.words import plural
from .metrics import PEEK_BYTES
from .state import RUNNING, read_run

# Names that only we use: of data sets, and in a run folder before its plan exists.
DATA_NAME = "(text|url|host|controller)-[0-9a-f]{8}"
DATA_FILE = r"shard_\d+\.parquet|\..+\.part(\.etag)?|\.lock|\.digests\.json|tokenizer\.pkl|token_bytes\.pt"
WHEELS_FOLDER = r"3\.\d+-[a-z0-9_]+(\.part)?"
PREPARED_NAMES = {"data", "tokenizer", "log", "base_data", "base_data_climbmix"}
# Folders that we copy files into, beside other people's.
BROUGHT = ("trainer", "tools")
ENV_MARK = b"# Written by nanochat.ddp"


class PurgeError(Exception):
    """Why nothing was removed; the text is for the user."""


class PurgePlan(NamedTuple):
    """Paths to remove, and other people's paths."""

    remove: List[str]
    stay: List[str]


def plan_purge(base: str, run: str, everything: bool) -> PurgePlan:
    """Find what a purge of a run, or of everything, would remove; changes nothing, and refuses while any of it is alive."""
    runs, tracker = os.path.join(base, "runs"), os.path.join(base, "tracker")
    found = PurgePlan([], [])
    if not everything:
        folder = os.path.join(runs, plain_run_name(run))
        _refuse_living(base, [folder])
        _sort(found, [folder], is_run_folder)
        return found
    _refuse_living(base, [*filter(os.path.isdir, paths_in(runs)), tracker])
    for folder, is_ours in {"runs": is_run_folder, "data": is_data_set, "wheels": is_wheels}.items():
        _sort(found, paths_in(os.path.join(base, folder)), is_ours)
    copied = [path for folder in BROUGHT for path in _deployed(os.path.join(base, folder))]
    found.remove.extend(path for path in copied if os.path.lexists(path))
    _sort(found, [tracker], lambda path: not os.path.islink(path) and read_bytes(f"{path}/env").startswith(ENV_MARK))
    _sort(found, [os.path.join(base, PYTHON_FOLDER)], lambda path: read_object(os.path.join(path, PYTHON_MARK)))
    _sort(found, [os.path.join(base, MEASURED)], read_object)
    return found


def _sort(found: PurgePlan, paths: List[str], is_ours: Callable[[str], Any]) -> None:
    """Add the paths that are there to what goes, or to what stays."""
    for path in filter(os.path.lexists, paths):
        (found.remove if is_ours(path) else found.stay).append(path)


def purge(base: str, run: str, everything: bool, dry: bool, end_sessions: Callable[[List[str]], None]) -> PurgePlan:
    """Remove what `plan_purge` found, and return it.

    end_sessions: ends the tmux sessions of these folders, which show how their runs ended.
    """
    found = plan_purge(base, run, everything)
    if not dry:
        end_sessions(found.remove)
        for path in found.remove:
            _remove(path)
        for parent in ("runs", "data", "wheels", *BROUGHT, "") if everything else ("runs",):
            _drop_empty(os.path.join(base, parent), deep=parent in BROUGHT)
    # Other files in the trainer's folders stay, and so do the folders.
    left = [os.path.join(base, name) for name in BROUGHT if everything and not dry]
    return PurgePlan(found.remove, [*found.stay, *(path for path in left if os.path.isdir(path))])


def in_brief(base: str, paths: List[str]) -> str:
    """Name these paths in a line, the files that were copied into folders by their number."""
    names = [os.path.relpath(path, base) for path in paths]
    copied = [name for name in names if name.split(os.sep)[0] in BROUGHT]
    parts = [name for name in names if name not in copied] + ([plural(len(copied), "copied file")] if copied else [])
    return f"in {base}: {', '.join(parts)}"


# -- ownership ---------------------------------------------------------------------------------------------------------


def is_run_folder(path: str) -> bool:
    """Whether a folder is a run's: by its name, and its plan, session or prepared data."""
    if os.path.islink(path) or not os.path.isdir(path) or not re.fullmatch(RUN_NAME, os.path.basename(path)):
        return False
    plan, session = read_object(os.path.join(path, PLAN)), read_object(os.path.join(path, SESSION))
    if isinstance(plan.get("nodes"), list) or str(session.get("session")).startswith("nanochat-"):
        return True
    names = set(os.listdir(path))
    # One that was never launched holds nothing but other names of files.
    others = (one for one in _files_below(path) if not os.path.islink(one) and os.lstat(one).st_nlink == 1)
    return SESSION_FILES in names or (names <= PREPARED_NAMES and not any(others))


def _files_below(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        yield from (os.path.join(root, name) for name in names)
        yield from (path for path in (os.path.join(root, name) for name in folders) if os.path.islink(path))


def is_data_set(path: str) -> bool:
    """Whether a folder is a data set: by its manifest, or by our names of it and of all that is in it if it is incomplete."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    manifest = read_object(os.path.join(path, MANIFEST))
    if isinstance(manifest.get("shards"), list):
        return True
    names = [os.path.basename(one) for one in _files_below(path)]
    is_named = re.fullmatch(DATA_NAME, os.path.basename(path)) is not None
    return is_named and bool(names) and all(re.fullmatch(DATA_FILE, name) for name in names)


def is_wheels(path: str) -> bool:
    """Whether a folder contains packages that we fetched or copied."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    if re.fullmatch(WHEELS_FOLDER, os.path.basename(path)) or read_object(os.path.join(path, WHEELS)):
        return True
    return isinstance(read_object(os.path.join(path, MANIFEST)).get("files"), list)


def _deployed(folder: str) -> List[str]:
    """The files that we copied into a folder, and their record."""
    record = os.path.join(folder, DEPLOYED)
    names = words(read_object(record), "files")
    inside = [name for name in names if not os.path.isabs(name) and ".." not in name.split("/") and "\0" not in name]
    return [*(os.path.join(folder, name) for name in inside), record] if inside else []


# -- liveness ----------------------------------------------------------------------------------------------------------


def _refuse_living(base: str, folders: List[str]) -> None:
    """Refuse while there is a process of these folders: a session, its remains, or a trainer started by hand."""
    table = processes.processes()
    markers = {one.marker: one for one in table.values() if one.marker and one.state not in ("Z", "X")}
    living: Dict[str, str] = {}
    for folder in folders:
        session = read_object(os.path.join(folder, SESSION))
        last = read_object(os.path.join(folder, SESSION_FILES, "launch.json"))
        ids = {one for one in (session.get("id"), last.get("id")) if isinstance(one, str)}
        left = next((markers[one] for one in ids if one in markers), None)
        if left:
            living[folder] = f"{session.get('session') or last.get('session') or folder} runs (process {left.pid})"
        elif read_run(folder, lines=0, limit=PEEK_BYTES)["state"] == RUNNING:
            living[folder] = f"a training runs in {folder}"
    if living:
        runs = [os.path.basename(one) for one in living if os.path.basename(os.path.dirname(one)) == "runs"]
        how = " and ".join(f"ansible-playbook nanochat.ddp.stop -i INVENTORY -e ddp_run={name}" for name in runs)
        told = f"{' and '.join(living.values())} below {base}, so nothing was removed there; stop it first"
        raise PurgeError(told + (f": {how}" if how else ""))


# -- removal -----------------------------------------------------------------------------------------------------------


def _remove(path: str) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        raise PurgeError(f"{error.filename or path} could not be removed: {error.strerror}") from error


def _drop_empty(folder: str, deep: bool) -> None:
    """Remove our empty folders; files that Python generated beside ours do not count."""
    for root, dummy, dummy_files in os.walk(folder, topdown=False) if deep else [(folder, [], [])]:
        if os.path.basename(root) == "__pycache__" and not os.path.islink(root):
            shutil.rmtree(root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(root)
