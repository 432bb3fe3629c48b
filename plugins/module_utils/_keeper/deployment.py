# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepares a run folder for a start, with its keeper, and removes what runs left behind."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional

from .._contract.run_folder import BOOT
from .._kit import host_code
from .._run import purge as purge_utils
from .._run.folder import KeeperSetup, make_ready, prepare
from .._session.tmux import end_sessions
from . import keeper


def run_folder(
    path: str,
    plan: Dict[str, Any],
    state: str = "deployed",
    fresh: bool = False,
    training: Optional[Dict[str, Any]] = None,
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
        result = make_ready(path, plan, fresh, check, training)
    else:
        result = prepare(path, plan, fresh, check, keeper_of(path, plan, host, keeper_secret), training)
    return {"boot": os.path.lexists(os.path.join(path, BOOT)), **result}


def keeper_of(path: str, plan: Mapping[str, Any], host: str, secret: str) -> Optional[KeeperSetup]:
    """The keeper's host, secret and program, if any."""
    if not plan.get("keeper") or not secret:
        return None
    return KeeperSetup(host, secret, host_code.program(keeper.__name__, "main", path))


def purge(base_dir: str, what: str, run: str = "", check: bool = False) -> Dict[str, object]:
    """Remove the folder of one run (what: `run`), or all that jobs keep below the base folder (`all`), or tell what that would be."""
    result = purge_utils.purge(base_dir, run, what == "all", check, end_sessions)
    return {"diff": {"before": "".join(f"{path}\n" for path in result["removed"]), "after": ""}, **result}
