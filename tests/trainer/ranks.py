# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real ranks for tests: processes on this machine that meet over Gloo on the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import forked

HERE = Path(__file__).resolve().parent
TRAINER = HERE.parents[1] / "trainer"
# Far more than needed: on a busy machine a rank may take a minute to start.
PATIENCE_SECONDS = 400


class Result(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


def free_port() -> int:
    """As tests/integration/local.py: a free port that no outgoing connection is given."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(10000, 29000))) as probe,
        ):
            return int(probe.getsockname()[1])


def environment(rank: int, world: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    others = ("NANOCHAT_", "TORCHELASTIC", "TEST_ROUTE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = {"PYTHONPATH": f"{TRAINER}{os.pathsep}{HERE}", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return kept | paths | quiet | {name: str(value) for name, value in place.items()} | dict(extra)


def torchrun_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Without what torchrun sets itself."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment(0, 1, 0, extra).items() if name not in own}


def start_each(
    argvs: Sequence[Sequence[str]], extra: Callable[[int], Mapping[str, str]] = lambda rank: {}
) -> list[forked.Python]:
    """`python ARGV...` once for each rank; argv and environment may differ between them."""
    port, world = free_port(), len(argvs)
    return [
        forked.Python(argv, TRAINER, environment(rank, world, port, extra(rank))) for rank, argv in enumerate(argvs)
    ]


def start(argv: Sequence[str], world: int) -> list[forked.Python]:
    """`python ARGV...` once for each rank."""
    return start_each([argv] * world)


def finish(
    processes: Sequence[forked.Python | subprocess.Popen[str]], seconds: float = PATIENCE_SECONDS
) -> list[Result]:
    """Wait for all; those that are late are killed, which gives code -9."""
    begun, results = time.monotonic(), []
    for process in processes:
        left = max(0.1, begun + seconds - time.monotonic())
        try:
            out, err = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        results.append(Result(process.returncode, out, err, time.monotonic() - begun))  # type: ignore[arg-type]
    return results


def call(module: str, function: str, world: int, *arguments: object) -> list[Result]:
    """Run module.function(comm, *arguments) of a test file in each of `world` ranks."""
    return finish(start(argv_of(module, function, *arguments), world))


def argv_of(module: str, function: str, *arguments: object) -> list[str]:
    """Python's arguments to run it in one rank."""
    return ["-c", f"import ranks; ranks.serve({module!r}, {function!r}, {arguments!r})"]


def serve(module: str, function: str, arguments: Sequence[object]) -> None:
    """The other end of call()."""
    import importlib

    from nanochat.kit.common import UserError, read_ranks
    from nanochat.parallel.comm import connect

    comm = None
    try:
        comm = connect(read_ranks(), "cpu", float(os.environ.get("TEST_TIMEOUT", "60")))
        getattr(importlib.import_module(module), function)(comm, *arguments)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        if comm is not None:
            comm.give_up(str(error), error.cause, error.blames)
        print(json.dumps({"cause": error.cause.value, "blames": error.blames}), flush=True)
        os._exit(2)
    comm.close()


def passed(results: Sequence[Result]) -> list[str]:
    """Standard output of each rank; fails unless all exited 0."""
    assert [r.code for r in results] == [0] * len(results), "\n".join(r.err[-2000:] for r in results)
    return [r.out for r in results]


def wait_until(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.01)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a metrics file, which may still be written to."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def last_json(result: str) -> Any:
    """The last line that a rank printed."""
    return json.loads(result.splitlines()[-1])
