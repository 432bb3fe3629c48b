# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Training runs of two ranks of which one is frozen (SIGSTOP) in a given phase: how does the other one end?

    python freeze_ranks.py FOLDER PHASE:RANK ...

Prints one JSON object a case. All ranks are forked from this process, which has imported everything once. They meet
without torchrun, so that rank 0 serves the store itself: frozen, it does not answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import ranks
from trainings import Job

from nanochat.kit.common import exit_code
from nanochat.record import metrics
from scripts import base_train

AT_ONCE = 4
TIMEOUT = 10
# Longer than any wait may take, and shorter than a test would like to wait.
LATE = 300
FLAGS = (
    "--num-iterations", "4", "--save-every", "2", "--eval-every", "2", "--eval-tokens", "400", "--sample-every", "2",
    "--timeout-seconds", str(TIMEOUT), "--resume",
)  # fmt: skip
# By the phase in a case's name: the trainer's phase, and the first step in which it freezes.
PHASES = {
    "rendezvous": ("rendezvous", 0), "agree": ("agree", 0), "resume": ("resume", 0), "data": ("data", 1),
    "step": ("forward_backward", 1), "sync": ("sync", 1), "eval": ("eval", 1), "sample": ("sample", 1),
    "save": ("save", 1), "end": ("end", 0),
}  # fmt: skip


class Case(NamedTuple):
    """A run: the process of each rank, and the rank that freezes."""

    name: str
    job: Job
    pids: list[int]
    frozen: int


def begin(folder: Path, name: str) -> Case:
    """Fork the ranks of one case."""
    phase, rank = name.split(":")
    job, port = Job(folder / name.replace(":", "-"), 2), ranks.free_port()
    pids = []
    for one in range(2):
        environment = ranks.environment(one, 2, port, job.environment(one))
        pid = os.fork()
        if not pid:
            run(job, one, environment, PHASES[phase] if one == int(rank) else ("", 0))
        pids.append(pid)
    return Case(name, job, pids, int(rank))


def run(job: Job, rank: int, environment: dict[str, str], freeze: tuple[str, int]) -> None:
    """A rank's whole life."""
    os.environ.update(environment)
    output = os.open(job.base(rank) / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    enter = metrics.Heartbeat.enter

    def freezing(self: metrics.Heartbeat, phase: str, step: int, collective: int = 0) -> None:
        enter(self, phase, step, collective)
        if phase == freeze[0] and step >= freeze[1]:
            os.kill(os.getpid(), signal.SIGSTOP)

    metrics.Heartbeat.enter = freezing  # type: ignore[method-assign]
    sys.argv[1:] = job.argv(FLAGS)[2:]
    os._exit(exit_code(base_train.main))


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def conclude(case: Case) -> dict[str, object]:
    """Wait for the other rank's end; then the frozen one's."""
    until, since = time.monotonic() + LATE, 0.0
    other, code = 1 - case.frozen, None
    while code is None and time.monotonic() < until:
        since = since or (time.monotonic() if stopped(case.pids[case.frozen]) else 0.0)
        ended, status = os.waitpid(case.pids[other], os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.05)
    for rank in (case.frozen, *([] if code is not None else [other])):
        os.kill(case.pids[rank], signal.SIGKILL)
        os.waitpid(case.pids[rank], 0)
    return {
        "case": case.name, "code": code, "froze": since > 0, "seconds": time.monotonic() - since,
        "output": (case.job.base(other) / "output").read_text(),
        "end": (case.job.events("end", other) or [None])[-1],
    }  # fmt: skip


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for begun in range(0, len(names), AT_ONCE):
        for case in [begin(folder, name) for name in names[begun : begun + AT_ONCE]]:
            print(json.dumps(conclude(case)), flush=True)


if __name__ == "__main__":
    main()
