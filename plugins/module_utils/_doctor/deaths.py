# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a rank ended and who caused it: from its own record, its signal, and the kernel."""

from __future__ import annotations

import re
from typing import List, NamedTuple

from .._rules.causes import Cause, is_echo
from .._run.health import Seen
from .evidence import RankEvidence, low_disk

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
# In the log of a keeper, which then exits with a code of its own.
KILLED = re.compile(r"keeper: rank \d+ was killed by signal 9\b")


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
        code = "rank-oom" if out_of_memory(found) else "rank-killed" if killed else "rank-vanished"
        return RankDeath(code, [rank], False)
    return RankDeath(FAILED, [], False)


def was_killed(found: RankEvidence) -> bool:
    """By SIGKILL; a trainer that could record its end was not, and the log may be of an earlier attempt."""
    run = found["run"]
    by_log = not run["end_error"] and KILLED.search("\n".join(run["last_lines"]))
    return run["signal"] == 9 or run["exit_code"] in (137, -9) or bool(by_log)


def out_of_memory(found: RankEvidence) -> bool:
    """The kernel reports it, or its count of OOM kills grew since the rank's last heartbeat."""
    before, now = found["oom_kills_before"], found["system"]["oom_kills"]
    return bool(found["kernel"]) or (before is not None and now is not None and now > before)
