# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of the files and folders below a host's base folder (docs/architecture.md)."""

from __future__ import annotations

import glob
import os
import re
from typing import Any, List

from .._rules.stages import STAGES

# The files of a tokenizer folder.
TOKENIZER = ("tokenizer.pkl", "token_bytes.pt")
# A run's name is also its folder and part of its sessions' names, so it must be a plain word.
GIVEN_NAME = "[A-Za-z0-9][A-Za-z0-9_-]{0,47}"
# A later stage of training is a separate run, named after the first; mid and eval were stages of earlier versions.
RUN_NAME = GIVEN_NAME + "(-(sft|mid|eval))?"
RUN_NAME_HELP = "1 to 48 letters, digits, - or _, for example d4-trial"
PLAN = "plan.json"
SESSION = "session.json"
# A session's runner and its last launch.
SESSION_FILES = ".session"
# Marks a folder as ours: a data set or packages, copied files, fetched packages.
MANIFEST = "manifest.json"
DEPLOYED = ".deployed.json"
WHEELS = ".wheels.json"
# An installed Python for hosts without a recent one: its folder, its mark, and the interpreter.
PYTHON_FOLDER, PYTHON_MARK = "python", ".made.json"
PYTHON_IN_FOLDER = "current/bin/python3"
# In an environment that this collection makes: last of all, and before anything else.
VENV_STAMP, VENV_MARK = ".nanochat-ddp.json", ".nanochat-ddp.building"
# Measured step times of this host.
MEASURED = "measured.json"
# Identifies the training in the folder: id, number and start time; the trainer reads it too.
TRAINING_FILE = "training.json"
# A keeper's folder, with its program, its settings, its memory and the request to leave the run.
KEEPER_FOLDER = ".keeper"
KEEPER_PROGRAM, KEEPER_SETTINGS, KEEPER_MEMORY, KEEPER_LEAVE = "keeper.py", "keeper.json", "state.json", "leave"
KEEPER_JOIN = "join"  # a user lets in a guest that would stay away by itself
# The keeper's view of who trains: now, and event by event.
MEMBERS, MEMBER_EVENTS = "members.json", "members.jsonl"
# Earlier generations of a run's outputs, numbered.
PREVIOUS = "previous"
# Checkpoints of the losing part of a split run.
APART = "apart"
# Where each stage saves, the base model first.
CHECKPOINTS = tuple(stage.folder for stage in STAGES.values())
CONVERSATIONS = "conversations.jsonl"
HELD_OUT = "conversations-val.jsonl"


class RunNameError(ValueError):
    """An invalid run name; the text is for the user."""


def plain_run_name(name: Any) -> str:
    """A validated run name; rejects anything that could lead out of the runs' folder."""
    if not isinstance(name, str) or not re.fullmatch(RUN_NAME, name):
        raise RunNameError(f"{str(name)[:80]!r} is not a valid run name (ddp_run); it must be {RUN_NAME_HELP}.")
    return name


def checkpoint_steps(run_dir: str) -> List[int]:
    """The steps of the checkpoints in a run folder or an earlier generation of it, sorted."""
    patterns = [os.path.join(glob.escape(run_dir), folder, "*", "meta_*.json") for folder in CHECKPOINTS]
    paths = [path for pattern in patterns for path in glob.glob(pattern)]
    # A link leads to the base model's run.
    own = [path for path in paths if not os.path.islink(os.path.dirname(path))]
    found = (re.search(r"meta_(\d+)\.json$", path) for path in own)
    return sorted({int(match.group(1)) for match in found if match})


def venv_kind(path: str) -> str:
    """absent (also empty), ours (also half-built), foreign (somebody else's environment) or occupied by something else."""
    try:
        names = os.listdir(path)
    except OSError:
        return "occupied" if os.path.lexists(path) else "absent"
    if VENV_STAMP in names or VENV_MARK in names:
        return "ours"
    return "foreign" if "pyvenv.cfg" in names else "occupied" if names else "absent"


def generations(run_dir: str) -> List[int]:
    """The numbers of the earlier generations of outputs kept in a run folder."""
    try:
        names = os.listdir(os.path.join(run_dir, PREVIOUS))
    except OSError:
        return []
    return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,9}", name))
