# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The screen about a run, for status and at the end of a watch: a row for each host, then sentences. Unknown values are a dash."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from .._contract.document import number
from .._kit.words import (
    DASH,
    bytes_text,
    clock_text,
    loss_text,
    named,
    seconds_text,
    share_text,
    speed_text,
    table,
)
from .health import USUAL, Health, Seen, StallLimits
from .sentences import ended_lines, ends_text, membership_lines, own_errors, start_lines, state_text
from .state import ABSENT, AWAY, CRASHED, FINISHED, RUNNING

# -- lines about all ranks ----------------------------------------------------------------------------------------------


def is_identical(health: Health) -> Optional[bool]:
    """Whether the weights were identical on all ranks; None if they were not compared."""
    runs = [one.run for one in health.by_rank()]
    told, digests = [run["identical"] for run in runs], {run["digest"] for run in runs if run["digest"]}
    if False in told or (len(digests) > 1 and all(run["state"] == FINISHED for run in runs)):
        return False
    return None if len(runs) < (health.first_known("world") or 0) or None in told else True


def identical_text(health: Health) -> str:
    """The same in words."""
    ranks, digest = health.first_known("world") or len(health.seen), health.first_known("digest")
    on_ranks, found = "on both ranks" if ranks == 2 else "on all %d ranks" % ranks, is_identical(health)
    if found is False:
        return "weights NOT identical %s: the ranks diverged" % on_ranks
    if found is None:
        return "weights not compared %s" % on_ranks
    return "weights identical %s%s" % (on_ranks, " (digest %s)" % digest[:16] if digest else "")


def changed_rows_lines(seen: Sequence[Seen]) -> List[str]:
    """Lines about changed shares, if any."""
    changed = {one.host: one.run for one in seen if one.run["rows_changed"] is not None}
    if not changed:
        return []
    last = max(run["rows_changed"] for run in changed.values())
    parts = ["%s %s -> %s" % (host, run["rows_before"], run["rows"]) for host, run in changed.items()]
    return ["shares of rows changed while training, last at step %s: %s" % (last, ", ".join(parts))]


# -- columns ------------------------------------------------------------------------------------------------------------


def _speed_now(one: Seen) -> str:
    """Only a rank that makes steps has a speed."""
    makes_steps = one.run["state"] == RUNNING and not one.waits and one.standstill is None
    return speed_text(one.run["tokens_per_second"]) if makes_steps else DASH


def _steps(one: Seen) -> str:
    """Finished and planned steps."""
    return "%s/%s" % (one.run["done"], one.run["steps"]) if one.run["steps"] else str(one.run["done"] or DASH)


def _waited(one: Seen) -> str:
    waited, share = seconds_text(one.run["wait_seconds"]), one.run["wait_share"]
    return waited if share is None else "%s (%s)" % (waited, share_text(share))


# A column's head, and its cell of a host.
COLUMNS: Sequence[Tuple[str, Callable[[Seen], str]]] = (
    ("host", lambda one: one.host),
    ("rank", lambda one: DASH if one.run["rank"] is None else str(one.run["rank"])),
    ("state", lambda one: one.verdict or ("no answer" if one.silent else state_text(one))),
    ("step", _steps),
    ("rows", lambda one: DASH if one.run["rows"] is None else str(one.run["rows"])),
    ("first loss", lambda one: DASH if one.run["state"] == RUNNING else loss_text(one.run["first_loss"])),
    ("loss", lambda one: "not a number" if one.run["diverged"] else loss_text(one.run["loss"])),
    ("val bpb", lambda one: loss_text(one.run["val_bpb"])),
    ("tok/s", _speed_now),
    ("mean tok/s", lambda one: speed_text(one.run["tokens_per_second_mean"])),
    ("waited", _waited),
    ("memory", lambda one: bytes_text(one.run["memory_bytes"])),
    ("checkpoint", lambda one: DASH if one.run["saved"] is None else "step %s" % one.run["saved"]),
)


# -- the screen ---------------------------------------------------------------------------------------------------------


def course_text(health: Health, now: float) -> str:
    """When the run began and ended, or its time left."""
    runs = [one.run for one in health.by_rank()]
    began = min((run["started"] for run in runs if run["started"]), default=None)
    if began is None:
        return ""
    if any(run["state"] == RUNNING for run in runs):
        eta = None if health.marks() else health.first_known("eta_seconds")
        left = "" if eta is None else ", %s left, until about %s" % (seconds_text(eta), clock_text(now + eta))
        if health.first_known("ends") is not None and eta is not None:
            left = ", " + ends_text(now + eta, health.first_known("share"))
        return ", began %s, %s ago%s" % (clock_text(began), seconds_text(max(0.0, now - began)), left)
    ended = max((run["ended"] for run in runs if run["ended"]), default=None)
    if ended is None:
        return ", began %s" % clock_text(began)
    took, since = seconds_text(max(0.0, ended - began)), seconds_text(max(0.0, now - ended))
    return ", took %s, ended %s, %s ago" % (took, clock_text(ended), since)


def _other_runs(seen: Sequence[Seen]) -> List[str]:
    """Hosts whose newest run is another one."""
    newer: Dict[str, List[str]] = {}
    for one in seen:
        if one.newest_run and one.newest_run != one.run["run"]:
            newer.setdefault(one.newest_run, []).append(one.host)
    told = "%s: the newest run there is %s (-e ddp_run=%s shows that one)"
    return [told % (named(hosts), name, name) for name, hosts in newer.items()]


def _headline(seen: Sequence[Seen], current: Health) -> str:
    name = current.first_known("run")
    if all(one.run["state"] is None for one in seen):
        return "no host answers"
    if name and any(one.run["state"] not in (None, ABSENT) for one in seen):
        return "run %s%s" % (name, course_text(current, time.time()))
    return "no run%s on any host" % (" %s" % name if name else "")


def current_health(seen: Sequence[Seen]) -> Health:
    """The hosts of the newest training, without those that hold an older one of the run."""
    # 0 if a host does not say which one it holds.
    numbers = {one.host: number(one.run["training"], "number") for one in seen}
    newest = max(numbers.values(), default=0)
    timeouts = [one.run["timeout_seconds"] for one in seen if one.run["timeout_seconds"]]
    limits = StallLimits(timeout=timeouts[0] if timeouts else USUAL.timeout)
    return Health([one for one in seen if numbers[one.host] in (0, newest)], limits)


def status_screen(seen: Sequence[Seen], width: int = 0) -> str:
    """The state of every host in the order of the ranks, in a table that fits the width (0: no limit), and sentences, which the
    display wraps."""
    current = current_health(seen)
    hosts = current.by_rank()
    marks = current.marks()
    rows = [one._replace(mark=marks.get(one.host)) for one in Health(seen).by_rank()]
    runs = [one.run for one in hosts]
    older = "%s: holds an older training of this run; the next start says how to set it aside"
    lines = [*ended_lines(runs), *start_lines(runs), *_other_runs(rows)]
    lines += [older % one.host for one in rows if one.host not in current.seen]
    lines += [*changed_rows_lines(hosts), *membership_lines(current)]
    slow = None if marks or len(current.parts) > 1 else current.slowest()
    if slow is not None:
        lines.append("slow one: %s (it waits least, so the others wait for it)" % slow)
    is_over = all(run["state"] != RUNNING for run in runs) and any(run["step"] is not None for run in runs)
    stayed = Health(one for one in hosts if AWAY not in (one.verdict, one.run["state"]))
    if (is_over and stayed.first_known("world") != 1) or any(run["identical"] is False for run in runs):
        lines.append(identical_text(stayed))
    saved = {one.host: one.run for one in hosts if is_over and one.run["saved"] is not None}
    lines += ["checkpoint of step %s on %s in %s" % (run["saved"], host, run["run_dir"]) for host, run in saved.items()]
    if not any(one.verdict for one in rows):
        # Who watched the run tells why it failed, and the doctor is asked at once.
        lines += ["%s: %s" % (one.host, one.problem) for one in rows if one.problem]
        lines += ["%s: %s" % error for error in own_errors(current).items()]
        if marks or any(one.state == CRASHED for one in rows):
            lines.append("run the playbook nanochat.ddp.doctor to find out why")
    cells = [[cell(one) for dummy, cell in COLUMNS] for one in rows]
    told = table([head for head, dummy in COLUMNS], cells, width)
    return "\n".join([_headline(rows, current), *told, *("  " + line for line in lines)])


def status_data(seen: Sequence[Seen]) -> Mapping[str, object]:
    """The same for programs."""
    rows, current = Health(seen), current_health(seen)
    marks = current.marks()
    hosts = {
        one.host: {
            **one.run,
            "reachable": not one.silent,
            "problem": one.problem,
            "shown": state_text(one._replace(mark=marks.get(one.host))),
        }
        for one in rows.by_rank()
    }
    return {"run": rows.first_known("run"), "slowest": current.slowest(), "hosts": hosts}
