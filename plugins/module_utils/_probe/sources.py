# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks paths and URLs from the settings, on a host or on the controller. Read-only."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from typing import Mapping, NamedTuple, Optional, Sequence

from .._contract.plan import ControllerQuestion, Here
from .._contract.probe import Folder
from .._contract.run_folder import TOKENIZER
from .._kit import bare
from .machine import disk

TRAINER_SCRIPT = os.path.join("scripts", "base_train.py")
# In a Python library, what scripts.make_shards leaves out.
NO_TEXT = ("site-packages", "dist-packages", "__pycache__")
# A tree without files is small; a large one is not read to its end.
MOST_FOLDERS = 2000
# Timeout for a slow repository; an unreachable one is an error.
GIT_SECONDS = 30
# Timeout for the optional check for a newer commit.
NEWER_SECONDS = 10


def folder_facts(path: str) -> Folder:
    """Describe a path: its kind, whether it is readable, and whether it contains parts of a data set or a trainer."""
    full = os.path.abspath(os.path.expanduser(path))
    kind = "folder" if os.path.isdir(full) else "file" if os.path.exists(full) else "absent"
    readable = os.access(full, os.R_OK | (os.X_OK if kind == "folder" else 0))
    return {
        "path": full,
        "kind": kind,
        "readable": readable,
        "shards": len(glob.glob(os.path.join(glob.escape(full), "*.parquet"))),
        "tokenizer": all(os.path.isfile(os.path.join(full, name)) for name in TOKENIZER),
        "text_bytes": text_bytes(full),
        "trainer": os.path.isfile(os.path.join(full, TRAINER_SCRIPT)),
    }


def text_bytes(path: str) -> Optional[int]:
    """The size of the visible files in a folder, or of a file; None for one with very many folders."""
    try:
        total = os.path.getsize(path) if os.path.isfile(path) else 0
        for number, (root, folders, names) in enumerate(os.walk(path)):
            if number > MOST_FOLDERS:
                return None
            folders[:] = [name for name in folders if not name.startswith(".") and name not in NO_TEXT]
            files = [os.lstat(os.path.join(root, name)) for name in names if not name.startswith(".")]
            total += sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
    except OSError:
        return None
    return total


class Repository(NamedTuple):
    """Why the controller cannot clone a repository (empty if it can), and the commits of its clone and of the repository."""

    problem: str
    commits: Mapping[str, str] = {"used": "", "newest": ""}


def repository(source: str, environment: Mapping[str, str]) -> Repository:
    """Ask a repository, and the controller's clone of it if there is one. # in the source precedes a version."""
    url, dummy, version = source.partition("#")
    if bare.find("git") is None:
        return Repository("git is not installed on the controller")
    # Never ask for a password in the middle of a play.
    quiet = {**environment, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    clone = checkout_of(source, environment)
    if os.path.isdir(os.path.join(clone, ".git")):
        code, used, dummy = bare.run(["git", "-C", clone, "rev-parse", "HEAD"], quiet, seconds=GIT_SECONDS)
        listed = bare.run(["git", "ls-remote", "--", url], quiet, seconds=NEWER_SECONDS)[1].split()
        commits = dict(zip(listed[1::2], listed[::2]))
        names = (f"refs/heads/{version}", f"refs/tags/{version}^{{}}", f"refs/tags/{version}") if version else ("HEAD",)
        newest = next((commits[name] for name in names if name in commits), "")
        return Repository("", {"used": used.strip() if code == 0 else "", "newest": newest})
    code, out, err = bare.run(["git", "ls-remote", "--", url], quiet, seconds=GIT_SECONDS)
    if err == bare.TIMED_OUT:
        return Repository(f"the repository does not answer within {GIT_SECONDS} s on the controller")
    if code != 0:
        return Repository(f"git on the controller: {_git_reason(err)}")
    known = _has_version(version, out.split()[1::2])
    return Repository("" if known else f"the repository has no branch or tag {version}")


def _git_reason(text: str) -> str:
    """The line of git's output with the reason; the last lines are advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith(("fatal:", "ssh:", "error:"))] or lines or ["nothing"]
    return reasons[0].rstrip(".")


def _has_version(version: str, references: Sequence[str]) -> bool:
    """Repositories do not list commits, so anything that looks like one is accepted."""
    commit = len(version) >= 7 and not set(version.lower()) - set("0123456789abcdef")
    names = [version, f"refs/heads/{version}", f"refs/tags/{version}"]
    return version in ("", "HEAD") or commit or any(name in references for name in names)


def checkout_of(source: str, environment: Mapping[str, str]) -> str:
    """Where the role trainer keeps a clone of the repository on the controller."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "/"), ".cache")
    return os.path.join(cache, "nanochat-ddp", "checkouts", hashlib.sha256(source.encode()).hexdigest()[:16])


def look(asked: ControllerQuestion, environment: Mapping[str, str]) -> Here:
    """Answer the plan's questions to the controller (_plan/questions.py)."""
    # The role collect resolves relative paths the same way.
    there = repository(asked["git"], environment) if asked["git"] else Repository("", {})
    results = os.path.join(environment.get("PWD", ""), os.path.expanduser(asked["results"]))
    return {
        "folders": {path: folder_facts(path) for path in asked["folders"]},
        "git": there.problem,
        "commits": dict(there.commits),
        "read_only": "" if disk(os.path.abspath(results))["writable"] else results,
    }
