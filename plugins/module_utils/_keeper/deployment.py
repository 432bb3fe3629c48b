# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepares a run folder for a start, with its keeper, and removes what runs left behind."""

from __future__ import annotations

import os
from typing import Dict, Optional

from .._contract.document import Document
from .._contract.lineage import Launched
from .._contract.run_folder import KEEPER_FOLDER, KEEPER_JOIN, KEEPER_LEAVE
from .._kit import host_code
from .._run import purge as purge_utils
from .._run.folder import KeeperSetup, make_ready, prepare
from .._session.boot import end_sessions
from .._trainer.venv import remove_venv
from . import keeper


def run_folder(
    path: str,
    plan: Document,
    state: str = "deployed",
    fresh: bool = False,
    training: Optional[Launched] = None,
    keeper_secret: str = "",
    host: str = "",
    check: bool = False,
) -> Dict[str, object]:
    """Bring a run folder to the plan, or tell what that would change.

    state: `ready` only makes the folder, and refuses what `deployed` would refuse, so that a run that still goes on in it is not stopped
    in vain. training: the one that the folder is to hold; outputs of another one, or with fresh all, are moved aside. keeper_secret: what
    the keepers of this start prove to each other that they know; without it a keeper that was there is taken away.
    """
    if state == "ready":
        return make_ready(path, plan, fresh, check, training)
    setup = None
    if plan.get("keeper") and keeper_secret:
        setup = KeeperSetup(host, keeper_secret, host_code.program(keeper.__name__, "main", path))
    return prepare(path, plan, fresh, check, setup, training)


def keeper_request(run_dir: str, leave: bool, join: bool = False, check: bool = False) -> Dict[str, object]:
    """Ask a keeper to leave the run, or no longer; join: to take part, whatever keeps this guest away."""
    wanted = {KEEPER_LEAVE: leave, **({KEEPER_JOIN: True} if join else {})}
    places = {os.path.join(run_dir, KEEPER_FOLDER, name): asked for name, asked in wanted.items()}
    new = {place: asked for place, asked in places.items() if os.path.exists(place) is not asked}
    for place, asked in ({} if check else new).items():
        if asked:
            # An empty file needs no room on a full disk.
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        else:
            os.unlink(place)
    return {"changed": bool(new)}


def purge(
    base_dir: str, what: str, host: str, run: str = "", venv_dir: str = "", check: bool = False
) -> Dict[str, object]:
    """Remove the folder of one run (what: `run`), or all that jobs keep below the base folder (`all`), or tell what that would be.

    venv_dir: the trainer's environment, which goes with all if this collection made it there. `said` tells people what goes and what stays.
    """
    everything, venv = what == "all", (venv_dir or os.path.join(base_dir, "venv")).rstrip("/")
    # Refuses while anything there is alive.
    purge_utils.plan_purge(base_dir, run, everything)
    is_own = venv.startswith(base_dir.rstrip("/") + "/")
    there = everything and os.path.exists(venv)
    # An environment that is not ours is used, but never removed.
    gone = everything and is_own and remove_venv(venv, host, check)
    # Last, so that the base folder goes if nothing else is in it.
    found = purge_utils.purge(base_dir, run, everything, check, end_sessions)
    removed = "would be removed" if check else "removed"
    elsewhere = "left alone, since it lies outside the base folder, where other inventories may use it"
    told = {
        f"{removed}: the trainer's Python environment {venv}": gone,
        f"{elsewhere}: {venv} (ddp_venv_dir)": there and not is_own,
        f"{removed}: {purge_utils.in_brief(base_dir, found.remove)}": found.remove,
        "nothing of it is there": not found.remove and not gone,
        f"left alone, since nanochat.ddp did not make it: {', '.join(found.stay)}": found.stay,
    }
    said = [f"{host}: {sentence}" for sentence, holds in told.items() if holds]
    diff = {"before": "".join(f"{path}\n" for path in found.remove), "after": ""}
    return {"changed": bool(found.remove) or gone, "diff": diff, "said": said}
