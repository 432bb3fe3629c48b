# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends the parts of a run that the controller lacks; also a bare program on the host."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._run.files import Missing, had, missing_files
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import WHICH_RUN, find_run_dir

OPTIONS: Dict[str, Dict[str, object]] = dict(
    **WHICH_RUN,
    dest=dict(type="str", required=True),
    checkpoints=dict(type="bool", default=False),
    have=dict(type="dict", default={}),
    room=dict(type="int", default=4000000),
)


class Sent(Missing):
    """The run (null if none) and what the controller lacks."""

    run: Optional[str]
    run_dir: Optional[str]


def send(params: Mapping[str, Any]) -> Sent:
    """The answer of run_files to the controller."""
    run_dir = find_run_dir(params)
    have = {path: had(known) for path, known in params["have"].items()}
    if run_dir is None or not os.path.isdir(run_dir):
        return {"run": None, "run_dir": run_dir, "pieces": [], "whole": [], "more": False}
    found = missing_files(run_dir, have, params["checkpoints"], params["room"])
    return {"run": os.path.basename(run_dir.rstrip("/")), "run_dir": run_dir, **found}


def say(mark: str, params: Dict[str, object]) -> None:
    """The program: returns that answer."""
    bare.answer(mark, send(bare.expanded(params, ["run_dir", "base_dir"])))
