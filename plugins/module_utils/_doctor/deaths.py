# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a rank ended and by whom, from what it wrote about that, from signals, and only without these from words."""

from __future__ import annotations

from typing import Dict, List, NamedTuple

from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import prose
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.evidence import Evidence
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor.reading import error_of
from ansible_collections.nanochat.ddp.plugins.module_utils._rules.causes import Cause, is_echo
from ansible_collections.nanochat.ddp.plugins.module_utils._run.standing import without_keeper

LOW_DISK = 64 * 1024 * 1024

# The findings for what the trainer writes as the cause of an end; for all others it is FAILED.
FAILED = "rank-failed"
CODES: Dict[str, str] = {
    cause.value: code
    for cause, code in (
        (Cause.PEER_LOST, "link-cut"),
        (Cause.PEER_LATE, "rank-stuck"),
        (Cause.STORE_LOST, "link-cut"),
        (Cause.LINK_LOST, "link-cut"),
        (Cause.PORT_TAKEN, "port-held"),
        (Cause.SETTINGS_DIFFER, "settings-differ"),
        (Cause.DATA_DIFFER, "data-mismatch"),
        (Cause.TORCH_DIFFERS, "torch-differs"),
        (Cause.CODE_DIFFERS, "trainer-differs"),
        (Cause.WEIGHTS_DIFFER, "weights-differ"),
        (Cause.NON_FINITE_LOSS, "loss-not-finite"),
        (Cause.OOM, "rank-oom"),
        (Cause.DISK_FULL, "disk-full"),
        (Cause.BAD_DATA, "data-mismatch"),
    )
}


class Death(NamedTuple):
    """Why a rank ended."""

    code: str
    blames: List[int]  # the ranks at fault, as far as the rank knew
    is_echo: bool  # it ended for no other reason than that another rank was missing or at fault
    cause: str = ""  # as the trainer wrote it


def death_of(found: Evidence, rank: int) -> Death:
    """Classify the end of a crashed rank."""
    run = found["run"]
    if without_keeper(run):
        # Its rank could still write why it ended, but that was only since the keeper had.
        free = (found.get("system") or {}).get("disk_free")
        full = free is not None and free < LOW_DISK
        return Death("rank-oom" if out_of_memory(found) else "disk-full" if full else "keeper-gone", [rank], False)
    if run.get("end_cause"):
        cause, blames = str(run["end_cause"]), [one for one in run.get("end_blames") or [] if isinstance(one, int)]
        return Death(CODES.get(cause, FAILED), blames, is_echo(cause, blames, rank), cause)
    killed = was_killed(found)
    if killed or (run.get("ended") is None and not run.get("end_error")):
        return Death(
            "rank-oom" if out_of_memory(found) else "rank-killed" if killed else "rank-vanished", [rank], False
        )
    text = error_of(found)
    return Death(prose.code_of(text), [], not run.get("signal") and prose.is_echo(text))


def was_killed(found: Evidence) -> bool:
    """By SIGKILL; torchrun ends with a code of its own then and says so in the log."""
    run = found["run"]
    if run.get("signal") == 9 or run.get("exit_code") in (137, -9):
        return True
    # A trainer that could still say why was not killed; the log may hold what an earlier attempt said.
    return not run.get("end_error") and prose.says_killed("\n".join([*(run.get("last_lines") or []), error_of(found)]))


def out_of_memory(found: Evidence) -> bool:
    """The kernel says so, or its count of processes killed for lack of memory has grown since the rank's last heartbeat."""
    before, now = found.get("oom_kills_before"), (found.get("system") or {}).get("oom_kills")
    return bool(found.get("kernel")) or (before is not None and now is not None and now > before)
