# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The path of a job's output, with pipes for the job and the pane, and a clock that the test sets.

Whole sessions are tried in tests/integration/test_tmux_session.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._session import runner


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Job:
    """The job's end of the pipe, and its output that has arrived."""

    def __init__(self, log: Path, writer: int, pane: int) -> None:
        self._log, self._writer, self._pane = log, writer, pane
        os.set_blocking(pane, False)

    def write(self, data: bytes) -> None:
        os.write(self._writer, data)

    def close(self) -> None:
        os.close(self._writer)

    def logged(self) -> bytes:
        return self._log.read_bytes()

    def shown(self) -> bytes:
        return os.read(self._pane, 1000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(runner, "time", made)
    return made


@contextlib.contextmanager
def piped(folder: Path) -> Iterator[tuple[Job, runner.Output]]:
    """A job and its output; meanwhile the pane replaces this process's standard output, around pytest's capture."""
    (reader, writer), (pane, shown), own = os.pipe(), os.pipe(), os.dup(1)
    os.dup2(shown, 1)
    try:
        output = runner.Output(str(folder / "log"), reader)
        try:
            yield Job(folder / "log", writer, pane), output
        finally:
            os.close(output.log)
    finally:
        os.dup2(own, 1)
        for descriptor in (reader, pane, shown, own):
            os.close(descriptor)


def test_half_a_line_is_shown_at_once_and_logged_when_its_rest_does_not_come(tmp_path: Path, clock: Clock) -> None:
    with piped(tmp_path) as (job, output):
        job.write(b"whole\n")
        output.pump(0)
        clock.now = 200.0
        job.write(b"half")
        output.pump(0)
        assert (job.shown(), job.logged()) == (b"whole\nhalf", b"whole\n")
        # More of the same line does not extend its time.
        clock.now = 200.4
        job.write(b"...")
        output.pump(0)
        assert (job.shown(), job.logged()) == (b"...", b"whole\n")
        clock.now = 200.6
        output.pump(0)
        assert job.logged() == b"whole\nhalf..."
        job.close()
