# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Python processes with torch imported: each is forked by a server that has imported it already.

Importing torch takes longer than most trainings of the tests. A server imports only third-party packages; each process
imports the trainer itself. Other tests cover real starts, also by torchrun.

Consecutive processes come from two servers with different hash seeds, which reveals code that depends on the order of a set.
When the tests end, also by a signal, the server notices and kills its processes.

    process = Python(["-m", "scripts.base_train", ...], cwd, environment, number)
    out, err = process.communicate(timeout=60)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SERVERS = 2
STATUS_BYTES, REQUEST_BYTES = 16, 2**17
FOREIGN = ("numpy", "pyarrow.parquet", "torch.distributed")


class Python:
    """The part of subprocess.Popen that tests of ranks need; output goes to files."""

    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], number: int = 0) -> None:
        self.returncode: int | None = None
        self._output = [tempfile.TemporaryFile() for dummy in range(2)]  # noqa: SIM115
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([list(argv), str(cwd), dict(environment)]).encode()
        with theirs:
            descriptors = [*(file.fileno() for file in self._output), theirs.fileno()]
            socket.send_fds(_server(number % SERVERS), [request], descriptors)
        self.pid = int(self._status.recv(STATUS_BYTES))

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for file in self._output:
            file.seek(0)
        out, err = (file.read().decode(errors="replace") for file in self._output)
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            told = self._status.recv(STATUS_BYTES)
            assert told, "the server of forked processes is gone"
            self.returncode = int(told)
            self._status.close()
        return self.returncode


@functools.cache
def _server(number: int) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONHASHSEED": str(number + 1)}
        # Ctrl-C ends the tests, and with them the server.
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=kept | own, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return ours


# -- in the server


def serve(control: socket.socket) -> list[str]:
    """Fork on request; returns in a forked process its arguments, and ends all of them once nobody can send requests."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, dummy_flags, dummy_address = socket.recv_fds(control, REQUEST_BYTES, 3)
        if not request:
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _start(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _start(request: bytes, out: int, err: int, status: int) -> list[str]:
    """Become the process with the arguments that this returns; its parent tells who asked for it its id and how it ended."""
    with socket.socket(fileno=status) as caller:
        if pid := os.fork():
            caller.send(str(pid).encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            # The test that started it may be gone.
            with contextlib.suppress(OSError):
                caller.send(str(code).encode())
            os._exit(0)
    argv, folder, environment = json.loads(request)
    for number, descriptor in ((1, out), (2, err)):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return list(argv)


def always(route: str) -> Callable[[list[Any]], Any]:
    """A replacement for numerics.choose that always picks this library of matrix products. Where both are about as fast, the trainer's
    self-test chooses sometimes one and sometimes the other; they round differently, so trainings could not be compared to the bit."""
    return lambda trials: next(trial for trial in trials if trial.route == route)


def run(argv: Sequence[str]) -> None:
    """Run these arguments as Python would."""
    import runpy

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

        numerics.choose = always(os.environ["TEST_ROUTE"])  # type: ignore[assignment]
    if first == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    for name in FOREIGN:
        importlib.import_module(name)
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
