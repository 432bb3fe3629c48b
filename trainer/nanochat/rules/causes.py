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
    """Reason of a run's end."""

    FINISHED = "finished"
    STOPPED = "stopped"
    PEER_LOST = "peer-lost"
    PEER_LATE = "peer-late"
    STORE_LOST = "store-lost"
    LINK_LOST = "link-lost"
    PORT_TAKEN = "port-taken"
    SETTINGS_DIFFER = "settings-differ"
    DATA_DIFFER = "data-differ"
    TORCH_DIFFERS = "torch-differs"
    CODE_DIFFERS = "code-differs"
    WEIGHTS_DIFFER = "weights-differ"
    NON_FINITE_LOSS = "non-finite-loss"
    OOM = "oom"
    DISK_FULL = "disk-full"
    DISK_FAILED = "disk-failed"
    BAD_DATA = "bad-data"
    BAD_CHECKPOINT = "bad-checkpoint"
    BAD_SETTINGS = "bad-settings"
    BUG = "bug"


MEANINGS = {
    Cause.FINISHED: "all steps are done",
    Cause.STOPPED: "a rank was asked to stop by SIGTERM or Ctrl-C",
    Cause.PEER_LOST: "the blamed ranks' heartbeats stopped: killed, frozen or cut off",
    Cause.PEER_LATE: "the blamed ranks are alive, but did not reach an exchange within the timeout",
    Cause.STORE_LOST: "the rendezvous store on the host of rank 0 does not answer",
    Cause.LINK_LOST: "all ranks are alive and arrived, but the connection between them broke or never came up",
    Cause.PORT_TAKEN: "another process holds the rendezvous port",
    Cause.SETTINGS_DIFFER: "the ranks were started with different settings, devices or number types",
    Cause.DATA_DIFFER: "the ranks have different shards or tokenizers",
    Cause.TORCH_DIFFERS: "the ranks have different versions of PyTorch",
    Cause.CODE_DIFFERS: "the ranks have different trainer files",
    Cause.WEIGHTS_DIFFER: "the ranks hold different weights",
    Cause.NON_FINITE_LOSS: "the loss is infinite or not a number",
    Cause.OOM: "not enough memory",
    Cause.DISK_FULL: "a disk is full",
    Cause.DISK_FAILED: "a folder cannot be read or written",
    Cause.BAD_DATA: "shards or tokenizer are missing, damaged or do not match",
    Cause.BAD_CHECKPOINT: "the checkpoint is damaged or belongs to another model, or none is complete",
    Cause.BAD_SETTINGS: "a setting is invalid, or not supported on this machine",
    Cause.BUG: "a bug in the trainer; `error` names the file with the traceback",
}

# Caused by another rank or the link to it; a restart may help.
LOSSES = frozenset(cause.value for cause in (Cause.PEER_LOST, Cause.PEER_LATE, Cause.STORE_LOST, Cause.LINK_LOST))
# A restart would hit these again; a user must fix them first.
LASTING = frozenset(
    cause.value
    for cause in (
        Cause.SETTINGS_DIFFER,
        Cause.DATA_DIFFER,
        Cause.TORCH_DIFFERS,
        Cause.CODE_DIFFERS,
        Cause.WEIGHTS_DIFFER,
        Cause.NON_FINITE_LOSS,
        Cause.DISK_FULL,
        Cause.BAD_DATA,
        Cause.BAD_CHECKPOINT,
        Cause.BAD_SETTINGS,
    )
)


def is_echo(cause: str, blames: Sequence[int], rank: int | None) -> bool:
    """Whether a rank ended only because of another one, judged by the cause and blame it recorded."""
    return cause in LOSSES or (bool(blames) and rank not in blames)
