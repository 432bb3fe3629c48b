# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Python processes with torch imported: each is forked by multiprocessing's server, which has imported it already.

Importing torch takes longer than most trainings of the tests. The server imports only third-party packages; each process
imports the trainer itself. Other tests cover real starts, also by torchrun.

    process = Python(["-m", "scripts.base_train", ...], cwd, environment)
    out, err = process.communicate(timeout=60)
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

FOREIGN = ["numpy", "pyarrow.parquet", "torch.distributed"]


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(FOREIGN)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        forkserver.ensure_running()
    return context


class Python:
    """The part of subprocess.Popen that tests of ranks need; output goes to files."""

    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._output = [tempfile.NamedTemporaryFile() for dummy in range(2)]  # noqa: SIM115
        names = [file.name for file in self._output]
        self._process = _server().Process(
            target=become, args=(list(argv), str(cwd), dict(environment), names), daemon=True
        )
        self._process.start()
        self.pid = int(self._process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (Path(file.name).read_text(encoding="utf-8", errors="replace") for file in self._output)
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(argv: Sequence[str], folder: str, environment: Mapping[str, str], output: Sequence[str]) -> None:
    """In the new process: act as Python with these arguments."""
    for number, name in enumerate(output, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    run(argv)


def always(wanted: str) -> Callable[[str], Any]:
    """A replacement for numerics.try_route, of which this library of matrix products comes out as the fastest. Where both are about as
    fast, the trainer would choose sometimes one and sometimes the other; they round differently, so trainings could not be compared to
    the bit."""
    from nanochat.model import numerics

    return lambda route: numerics.Trial(route, 0.0, float(route != wanted))


def run(argv: Sequence[str]) -> None:
    """Run these arguments as Python would."""
    first, *rest = argv
    from_environment = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if first in ("-m", "-c"):
        what, *rest = rest
        sys.path[0:1] = [str(Path.cwd()), *from_environment]
        sys.argv = [first, *rest]
    else:
        sys.path[0:1] = [str(Path(first).parent), *from_environment]
        sys.argv = list(argv)
    if os.environ.get("TEST_ROUTE"):
        from nanochat.model import numerics

        numerics.try_route = always(os.environ["TEST_ROUTE"])  # type: ignore[assignment]
    if first == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")
