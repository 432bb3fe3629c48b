# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torchrun that reports failures in one sentence instead of a traceback, and does not wait minutes for dead agents.

    python -m scripts.torchrun --nnodes=2 --node-rank=0 --master-addr=192.168.1.10 -m scripts.base_train -- --depth=4

All flags are torchrun's own. A failed rank has printed its own error above. Ranks started with -m are forked from the agent,
which has already loaded PyTorch: loading it again would take seconds and a second copy's memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

# All ranks end together, so an agent that is later than this was killed; torchrun itself waits 300 s.
EXIT_BARRIER_SECONDS = 30
# torch's default time limit for ranks to exit, and no limit in effect, for a stop by the user.
SHUTDOWN_SECONDS, STOP_SECONDS = 30, 10**6
EXIT_ERROR = 1
# Another agent is missing, or somebody asked this one to end: the keeper blames no rank for it.
EXIT_OF_OTHERS = os.EX_UNAVAILABLE
# Process name of a forked rank, which has the agent's command line and environment; the collection recognises ranks by it.
RANK_NAME = "nanochat-rank"
STDERR = 2
LOWEST_PRIORITY = 19
# Handled by the agent; a rank resets them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Agent(LocalElasticAgent):
    """An agent that forwards a signal and waits until its ranks have saved; once they have succeeded, SIGTERM no longer
    keeps it from telling the other agents."""

    signalled = False

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except SignalException:
            self.signalled = True
            raise

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_SECONDS) -> None:
        if self.signalled:
            # Ranks finish their step and save; only the caller knows how long that may take (--shutdown-timeout).
            timeout = STOP_SECONDS if timeout == SHUTDOWN_SECONDS else timeout
            for number in SIGNALS:
                # A host shutting down sends several.
                signal.signal(number, self.end_at_once if number == signal.SIGINT else signal.SIG_IGN)
            tell(f"received {death_sig.name}; waiting for the ranks to save and exit (Ctrl-C kills them)")
        # Ranks save on SIGTERM and Ctrl-C, and should also when the terminal is closed.
        super()._shutdown(signal.SIGTERM if death_sig == signal.SIGHUP else death_sig, timeout)

    def end_at_once(self, number: int, frame: object) -> None:
        """Kill the remaining ranks."""
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            if handler.proc.poll() is None:
                handler.close(death_sig=signal.SIGKILL)

    def _exit_barrier(self) -> None:
        # A stop of one host after the other may find this agent without ranks; if killed now, the others would wait for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super()._exit_barrier()  # type: ignore[no-untyped-call]


class RankHandler(SubprocessHandler):
    """A forked rank, as its agent sees it."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        # Third-party scripts may not survive a fork.
        if args[1:3] != ("-u", "-m") or self._stdout or self._stderr or sys.platform != "linux":
            return super()._popen(args, env)
        # Hold signals back until the rank has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return Forked(args[3], args[4:], env)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class Forked:
    """The part of Popen's interface that an agent uses, for a forked process."""

    def __init__(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        ready, set_up = os.pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=become_rank, args=(module, words, environment, set_up))
        self.process.start()
        self.pid = self.process.pid
        # Wait until the rank has its own process group to signal.
        os.close(set_up)
        os.read(ready, 1)
        os.close(ready)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
        return self.process.exitcode


def main() -> int:
    elastic.get_subprocess_handler = RankHandler  # type: ignore[attr-defined,assignment]
    api.LocalElasticAgent = functools.partial(  # type: ignore[attr-defined,assignment]
        Agent, exit_barrier_timeout=EXIT_BARRIER_SECONDS
    )
    args = parse_args(sys.argv[1:])
    try:
        with scratch(args.node_rank) as folder:
            args.log_dir = args.log_dir or folder
            run(args)
    except ChildFailedError as error:
        return tell(" and ".join(ended(rank, failure) for rank, failure in sorted(error.failures.items())))
    except SignalException as error:
        return tell(f"was terminated by {error.sigval.name} and stopped its ranks", EXIT_OF_OTHERS)
    except (DistError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        of_others = isinstance(error, DistError) and "EADDRINUSE" not in str(error)
        what = f"could not start or hold the ranks: {lines[0].rstrip('.')}"
        return tell(what, EXIT_OF_OTHERS if of_others else EXIT_ERROR)
    except KeyboardInterrupt:
        return tell("was terminated by SIGINT and stopped its ranks", EXIT_OF_OTHERS)
    return 0


@contextlib.contextmanager
def scratch(node: int) -> Iterator[str]:
    """The scratch folder that torchrun needs. A killed agent leaves it behind; the next one removes it."""
    base = os.environ.get("NANOCHAT_BASE_DIR")
    if not base:
        with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
            yield folder
        return
    kept = Path(base, f"agent-{node}")
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    try:
        yield str(kept)
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def become_rank(module: str, words: Sequence[str], environment: Mapping[str, str], set_up: int) -> None:
    """In the forked process: drop the agent's state and act as `python -u -m module words`."""
    os.setsid()
    if os.getpriority(os.PRIO_PROCESS, 0) == LOWEST_PRIORITY:
        # A new session has a new autogroup, which competes with others at normal priority.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(LOWEST_PRIORITY), encoding="ascii")
    Path("/proc/self/comm").write_text(RANK_NAME, encoding="ascii")
    close_sockets()
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.close(set_up)
    for stream in (sys.stdout, sys.stderr):
        # None where it was closed.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    os.environ.update(environment)
    # OpenMP read this in the agent, before torchrun set it for several ranks.
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(max(1, int(threads)))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def close_sockets() -> None:
    """Close the sockets of the agent's store; while this process held them, nobody would notice the agent's death."""
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        # The listing includes the listed folder's own descriptor.
        with contextlib.suppress(OSError):
            if number > STDERR and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def ended(rank: int, failure: object) -> str:
    """How one rank ended, in searchable words."""
    code, pid = getattr(failure, "exitcode", None), getattr(failure, "pid", None)
    if isinstance(code, int) and code < 0:
        return f"rank {rank} (pid {pid}) was killed by signal {-code} ({signal.Signals(-code).name}, exitcode: {code})"
    return f"rank {rank} (pid {pid}) ended with exit code {code}"


def tell(what: str, code: int = EXIT_ERROR) -> int:
    print(f"torchrun: {what}.", file=sys.stderr, flush=True)
    return code


def leave(code: int) -> NoReturn:
    """Exit without unloading PyTorch, which takes half a second while a restart waits. (The ranks' `leave` cannot be imported
    beside a checkout, which has its own package `nanochat`.)"""
    for stream in (sys.stdout, sys.stderr):
        # None where it was closed.
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
