# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The records of a session: its launch (launch.json) and its outcome (session.json)."""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Mapping, Optional, Type, TypedDict, TypeVar, cast

from .._contract.decode import decode
from .._contract.run_folder import SESSION, SESSION_FILES
from .._contract.validate import InvalidHostData
from .._kit.files import read_object
from .._kit.ownership import exposure, exposure_of_run

LAUNCH, RUNNER, SCRIPT = "launch.json", "runner.py", "run.sh"
# Exit code (EX_TEMPFAIL) of an unfinished job that wants to be restarted.
COME_BACK = os.EX_TEMPFAIL
Kept = TypeVar("Kept", bound=Mapping[str, object])


def runner_argv(state_dir: str) -> List[str]:
    """The command of a session's runner."""
    folder = os.path.join(state_dir, SESSION_FILES)
    # -E and -s: neither a tmux server's environment nor a user's packages may affect it.
    return [sys.executable, "-B", "-E", "-s", os.path.join(folder, RUNNER), folder]


class Spec(TypedDict):
    """The job of a session."""

    argv: List[str]
    chdir: str
    env_file: Optional[str]
    log: str


class StartArguments(Spec):
    """The same of a start, with digests instead of environment values."""

    env: Dict[str, str]


class Launch(TypedDict, total=False):
    """Arguments of the last launch, for the runner; empty if there was none."""

    id: str
    session: str
    boot_id: str
    stop_timeout: float
    revive: bool  # restart it when it dies
    given: StartArguments


class Record(TypedDict, total=False):
    """A session since its start; empty if there is none."""

    id: str
    session: str
    boot_id: str
    pid: int
    pid_start: Optional[int]
    child_pid: Optional[int]
    log: str
    started: float
    ended: Optional[float]
    exit_code: Optional[int]
    signal: Optional[int]
    stopped: bool  # by a user
    terminated_by: Optional[str]  # the signal with which the host ended it
    revived: int  # number of restarts
    died_of: Optional[str]  # when it died last
    state: str  # as observed; in no file


def launch_in(run_dir: str) -> Launch:
    """The arguments of the last launch."""
    found = _read(Launch, os.path.join(run_dir, SESSION_FILES, LAUNCH))
    return found if found.get("id") else {}


def record_in(run_dir: str) -> Record:
    """A session's record."""
    return _read(Record, os.path.join(run_dir, SESSION))


def _read(kind: Type[Kept], path: str) -> Kept:
    """The file's content; empty if it is missing, or somebody has edited or overwritten it."""
    try:
        return decode(kind, read_object(path))
    except InvalidHostData:
        return cast(Kept, {})


def exposed_start(state_dir: str, spec: Spec) -> str:
    """Who else could change what a start runs, and the command that prevents it; empty for nobody.

    The files in the folder itself are ours; the program may also be another owner's that the user chose.
    """
    own, chdir = filter(None, [os.path.join(state_dir, SCRIPT), spec["env_file"]]), spec["chdir"]
    used = [os.path.join(chdir, word) for word in spec["argv"][:1] if "/" in word]
    found = [*(exposure(path) for path in own), *(exposure(path, owned=False) for path in (chdir, *used))]
    return next(filter(None, [exposure_of_run(state_dir), *found]), "")


def cut_short(exit_code: Optional[int]) -> bool:
    """Whether an ended job was killed (no exit code) or wants to be restarted."""
    return exit_code in (None, COME_BACK)
