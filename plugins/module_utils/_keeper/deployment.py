# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepares a run folder for a start, with its keeper, for the module run_folder; also a bare program on the host."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

from .._kit import bare, host_code
from .._run.folder import KeeperSetup, RunFolderError, make_ready, prepare
from . import keeper

# The options of run_folder.
OPTIONS: Dict[str, Dict[str, object]] = {
    "path": {"type": "path", "required": True},
    "plan": {"type": "dict", "required": True},
    "fresh": {"type": "bool", "default": False},
    "state": {"type": "str", "choices": ["ready", "deployed"], "default": "deployed"},
    "host": {"type": "str"},
    "training": {
        "type": "dict",
        "options": {
            "id": {"type": "str", "required": True},
            "number": {"type": "int", "required": True},
            "begun": {"type": "int", "required": True},
            "goes_on": {"type": "str"},
            "ends": {"type": "int"},
            "now": {"type": "float"},
            "base": {"type": "str"},
        },
    },
    "keeper_secret": {"type": "str", "no_log": True},
}


def keeper_of(params: Mapping[str, Any]) -> Optional[KeeperSetup]:
    """The keeper's host, secret and program, if any."""
    if not params["plan"].get("keeper") or not params["keeper_secret"]:
        return None
    return KeeperSetup(
        params["host"], params["keeper_secret"], host_code.program(keeper.__name__, "main", params["path"])
    )


def apply(params: Mapping[str, Any], check: bool) -> Dict[str, object]:
    """Bring the folder into its state, or predict that, and return the result."""
    path, plan, fresh, training = (params[name] for name in ("path", "plan", "fresh", "training"))
    if params["state"] == "ready":
        return {**make_ready(path, plan, fresh, check, training)}
    return {**prepare(path, plan, fresh, check, keeper_of(params), training)}


def say(mark: str, params: Dict[str, Any]) -> None:
    """The program: returns the result of run_folder."""
    bare.change(mark, params, ["path"], apply, (RunFolderError,))
