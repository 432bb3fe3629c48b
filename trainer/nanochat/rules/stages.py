# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages of training: by which script, and where each saves. A stage after base is a run of its own, NAME-STAGE."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """One stage, as people name it."""

    name: str
    script: str  # of our trainer and of checkouts alike
    folder: str  # of its checkpoints, below the base folder
    trains: bool = True  # or measures only, and saves nothing


BASE = Stage("base", "scripts.base_train", "base_checkpoints")
# Only checkouts have it.
MID = Stage("mid", "scripts.mid_train", "mid_checkpoints")
SFT = Stage("sft", "scripts.chat_sft", "chatsft_checkpoints")
EVAL = Stage("eval", "scripts.base_eval", "evaluated_checkpoints", trains=False)
STAGES = {stage.name: stage for stage in (BASE, MID, SFT, EVAL)}
LATER = tuple(name for name in STAGES if name != BASE.name)
