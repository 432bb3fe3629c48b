# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a run ended: a short code, set where the fault is detected and written to the `end` event.

    raise UserError("...", Cause.DISK_FULL, blames=[3])

This is the only list of codes, also used by keepers and doctor; a test compares it with the table in docs/architecture.md.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Cause(enum.Enum):
    """Reason of a run's end; its value is the code."""

    _value_: str
    meaning: str
    lasting: bool  # a restart would hit it again; a user must fix it first

    def __new__(cls, code: str, meaning: str = "", lasting: bool = False) -> Cause:
        cause = object.__new__(cls)
        cause._value_, cause.meaning, cause.lasting = code, meaning, lasting
        return cause

    FINISHED = "finished", "all steps are done"
    STOPPED = "stopped", "a rank was asked to stop by SIGTERM or Ctrl-C"
    PEER_LOST = "peer-lost", "the blamed ranks' heartbeats stopped: killed, frozen or cut off"
    PEER_LATE = "peer-late", "the blamed ranks are alive, but did not reach an exchange within the timeout"
    STORE_LOST = "store-lost", "the rendezvous store on the host of rank 0 does not answer"
    LINK_LOST = "link-lost", "all ranks are alive and arrived, but the connection between them broke or never came up"
    PORT_TAKEN = "port-taken", "another process holds the rendezvous port"
    SETTINGS_DIFFER = "settings-differ", "the ranks were started with different settings", True
    DATA_DIFFER = "data-differ", "the ranks have different shards or tokenizers", True
    TORCH_DIFFERS = "torch-differs", "the ranks have different versions of PyTorch", True
    CODE_DIFFERS = "code-differs", "the ranks have different trainer files", True
    WEIGHTS_DIFFER = "weights-differ", "the ranks hold different weights", True
    NON_FINITE_LOSS = "non-finite-loss", "the loss is infinite or not a number", True
    OOM = "oom", "not enough memory"
    DISK_FULL = "disk-full", "a disk is full", True
    DISK_FAILED = "disk-failed", "a folder cannot be read or written"
    BAD_DATA = "bad-data", "shards or tokenizer are missing, damaged or do not match", True
    BAD_CHECKPOINT = "bad-checkpoint", "the checkpoint is damaged or of another model, or none is complete", True
    BAD_SETTINGS = "bad-settings", "a setting is invalid, or not supported on this machine", True
    BUG = "bug", "a bug in the trainer; `error` names the file with the traceback"


# Caused by another rank or the link to it; a restart may help.
LOSSES = frozenset(cause.value for cause in (Cause.PEER_LOST, Cause.PEER_LATE, Cause.STORE_LOST, Cause.LINK_LOST))
LASTING = frozenset(cause.value for cause in Cause if cause.lasting)


def is_echo(cause: str, blames: Sequence[int], rank: int | None) -> bool:
    """Whether a rank ended only because of another one, judged by the cause and blame it recorded."""
    return cause in LOSSES or (bool(blames) and rank not in blames)
