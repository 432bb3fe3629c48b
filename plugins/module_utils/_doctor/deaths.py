# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a rank ended and who caused it: from its own record, from signals, and only otherwise from log messages."""

from __future__ import annotations

from typing import List, NamedTuple

from .._rules.causes import Cause, is_echo
from .._run.health import Seen
from . import prose
from .evidence import RankEvidence
from .reading import error_of, low_disk, system_of

# Findings by the trainer's cause of an end; FAILED for all others.
FAILED = "rank-failed"
CODES = {
    Cause.PEER_LOST.value: "link-cut",
    Cause.PEER_LATE.value: "rank-stuck",
    Cause.STORE_LOST.value: "link-cut",
    Cause.LINK_LOST.value: "link-cut",
    Cause.PORT_TAKEN.value: "port-held",
    Cause.SETTINGS_DIFFER.value: "settings-differ",
    Cause.DATA_DIFFER.value: "data-mismatch",
    Cause.TORCH_DIFFERS.value: "torch-differs",
    Cause.CODE_DIFFERS.value: "trainer-differs",
    Cause.WEIGHTS_DIFFER.value: "weights-differ",
    Cause.NON_FINITE_LOSS.value: "loss-not-finite",
    Cause.OOM.value: "rank-oom",
    Cause.DISK_FULL.value: "disk-full",
    Cause.BAD_DATA.value: "data-mismatch",
}


class RankDeath(NamedTuple):
    """Why a rank ended."""

    code: str
    blames: List[int]  # the ranks at fault, if known
    is_echo: bool  # it ended only because another rank was missing or at fault
    cause: str = ""  # as the trainer recorded it


def death_of(found: RankEvidence, rank: int) -> RankDeath:
    """Classify the end of a crashed rank."""
    run = found["run"]
    if Seen("", run).lost_its_keeper:
        # Its rank could still record why it ended, but only because the keeper had ended first.
        full = low_disk(found) is not None
        return RankDeath("rank-oom" if out_of_memory(found) else "disk-full" if full else "keeper-gone", [rank], False)
    if run["end_cause"]:
        cause, blames = run["end_cause"], run["end_blames"] or []
        return RankDeath(CODES.get(cause, FAILED), blames, is_echo(cause, blames, rank), cause)
    killed = was_killed(found)
    if killed or (run["ended"] is None and not run["end_error"]):
        return RankDeath(
            "rank-oom" if out_of_memory(found) else "rank-killed" if killed else "rank-vanished", [rank], False
        )
    text = error_of(found)
    return RankDeath(prose.code_of(text), [], not run["signal"] and prose.is_echo(text))


def was_killed(found: RankEvidence) -> bool:
    """By SIGKILL; a keeper or torchrun then exits with its own code and logs it."""
    run = found["run"]
    if run["signal"] == 9 or run["exit_code"] in (137, -9):
        return True
    # A trainer that could record the reason was not killed; the log may be from an earlier attempt.
    return not run["end_error"] and prose.says_killed("\n".join([*run["last_lines"], error_of(found)]))


def out_of_memory(found: RankEvidence) -> bool:
    """The kernel reports it, or its count of OOM kills grew since the rank's last heartbeat."""
    before, now = found.get("oom_kills_before"), system_of(found).get("oom_kills")
    return bool(found.get("kernel")) or (before is not None and now is not None and now > before)
