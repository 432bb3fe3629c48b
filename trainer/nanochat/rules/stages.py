# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages of training, their scripts and checkpoint folders. A stage after base is a separate run, NAME-STAGE."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """One stage; name is the value of ddp_stage."""

    name: str
    script: str
    folder: str  # of its checkpoints, in the base folder


BASE = Stage("base", "scripts.base_train", "base_checkpoints")
SFT = Stage("sft", "scripts.chat_sft", "chatsft_checkpoints")
STAGES = {stage.name: stage for stage in (BASE, SFT)}
