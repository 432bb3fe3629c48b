# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real all-reduce among all ranks with short timeouts: does Gloo work between these hosts, and how fast?

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=192.168.1.10 MASTER_PORT=29500 python -m scripts.gloo_check --timeout 20

Run it on all hosts at once, as above or under torchrun. Prints one JSON object; exits 0 on success.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Not exported by the package.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from nanochat.parallel.agreement import code_digest

SMALL_ROUNDS = 20
# Messages at once, about as many as a small model's step has, and so small that a line's rate does not count.
MESSAGES, MESSAGE_FLOATS = 20, 16
# The large tensor takes too long where this part of it takes longer; then the part is what is measured.
PART, PART_SECONDS = 8, 0.5


class PhaseError(Exception):
    """The phase that failed, with the library's message."""

    def __init__(self, phase: str, words: str) -> None:
        self.phase, self.words = phase, words
        super().__init__(f"{phase}: {words}")


def in_phase(phase: str, work: Callable[[], Any]) -> Any:
    """Do the work; errors name the phase."""
    try:
        return work()
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise PhaseError(phase, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """The library's message without source file, line, stack and guesses."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*|\s*(Exception raised from|This is typically caused by).*$", "", line)[:200].rstrip(
        ". "
    )


def join(environ: Mapping[str, str], timeout: float) -> tuple[int, int]:
    """Rendezvous and full mesh. Gloo stops trying to connect only after five times its timeout.

    Ranks reach the rendezvous after importing PyTorch, which on a busy or slow host takes longer than everything here:
    NANOCHAT_START_SECONDS limits how long the others wait for them.
    """
    try:
        rank, world, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        address = environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise PhaseError("start", f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are needed ({error})") from error
    started = seconds_since_start()
    limit = timedelta(seconds=max(timeout, float(environ.get("NANOCHAT_START_SECONDS") or 0)))
    serves = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = in_phase(
        "rendezvous",
        lambda: TCPStore(address, port, world, serves, limit, wait_for_workers=True, multi_tenant=True),
    )
    prefixed = PrefixStore("gloo-check", store)
    slowest = in_phase("rendezvous", lambda: slowest_start(prefixed, rank, world, started))
    short = timedelta(seconds=max(2.0, timeout / 5, slowest))
    in_phase(
        "connecting",
        lambda: dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=short),
    )
    return rank, world


def seconds_since_start() -> float:
    """Seconds since this process started, most of them importing PyTorch; 0 if unknown."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text(encoding="utf-8").rpartition(") ")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def slowest_start(store: PrefixStore, rank: int, world: int, seconds: float) -> float:
    """Start-up time of the slowest rank; a host this busy is as slow at other things."""
    store.set(f"started-{rank}", str(seconds))
    return max(float(store.get(f"started-{other}")) for other in range(world))


def check_sums(rank: int, world: int) -> None:
    """Check sums whose every element is known."""
    numbers = torch.arange(4096, dtype=torch.float32) * (rank + 1)
    in_phase("all-reduce", lambda: dist.all_reduce(numbers))
    expected = torch.arange(4096, dtype=torch.float32) * (world * (world + 1) // 2)
    if not torch.equal(numbers, expected):
        raise PhaseError("all-reduce", "the sum is wrong: ranks of different runs may have mixed")


def measure(rank: int, world: int, size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a small all-reduce and of a small message, and Mbit/s sent per rank during large all-reduces."""
    bulk, sent = 0.0, 0.0
    if world > 1:
        bulk, sent = measure_bulk(torch.ones(size // 4), rounds)
    return {
        "latency_ms": round(1000 * median(timed(lambda: dist.all_reduce(torch.zeros(1)))), 3),
        "message_ms": round(1000 * median(timed(lambda: exchange(rank, world))) / MESSAGES, 3) if world > 1 else 0.0,
        "bandwidth_mbit": round(2 * (world - 1) * sent / world * 8 / bulk / 1e6, 1) if world > 1 else 0.0,
    }


def measure_bulk(large: torch.Tensor, rounds: int) -> tuple[float, int]:
    """The seconds of a large all-reduce, and its bytes."""
    part = large[: max(1, len(large) // PART)]
    in_phase("all-reduce of large tensors", lambda: dist.all_reduce(part))
    slowest = torch.tensor([next(timed(lambda: dist.all_reduce(part)))], dtype=torch.float64)
    # All ranks must decide alike.
    in_phase("all-reduce", lambda: dist.all_reduce(slowest, dist.ReduceOp.MAX))
    if float(slowest) > PART_SECONDS:
        return float(slowest), part.nbytes
    return min(itertools.islice(timed(lambda: dist.all_reduce(large)), rounds)), large.nbytes


def exchange(rank: int, world: int) -> None:
    """Messages to the next rank and from the one before, started at once like those of a step."""
    mine, theirs = torch.ones(MESSAGES, MESSAGE_FLOATS), torch.empty(MESSAGES, MESSAGE_FLOATS)
    works: list[Any] = [dist.irecv(one, (rank - 1) % world, tag=tag) for tag, one in enumerate(theirs)]
    works += [dist.isend(one, (rank + 1) % world, tag=tag) for tag, one in enumerate(mine)]
    for work in works:
        work.wait()


def timed(work: Callable[[], Any]) -> Iterator[float]:
    """The seconds of something that all ranks do at the same time, again and again."""
    while True:
        in_phase("all-reduce", dist.barrier)
        begin = time.perf_counter()
        in_phase("all-reduce", work)
        yield time.perf_counter() - begin


def median(seconds: Iterator[float]) -> float:
    return statistics.median(itertools.islice(seconds, SMALL_ROUNDS))


def check(environ: Mapping[str, str], timeout: float, size: int, rounds: int) -> dict[str, Any]:
    """Run all phases; the result says how far it got."""
    begin = time.monotonic()
    result: dict[str, Any] = {
        "ok": False,
        "phase": "start",
        "error": "",
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "trainer": code_digest(),
    }
    try:
        rank, world = join(environ, timeout)
        result.update(rank=rank, world=world)
        check_sums(rank, world)
        result.update(measure(rank, world, size, rounds), ok=True, phase="done")
    except PhaseError as error:
        result.update(phase=error.phase, error=error.words)
    result["seconds"] = round(time.monotonic() - begin, 2)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run and time an all-reduce among all ranks.")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for the other ranks")
    parser.add_argument("--bytes", type=int, default=8 << 20, help="size of the large tensor")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions")
    options = parser.parse_args(argv)
    result = check(os.environ, options.timeout, options.bytes, options.rounds)
    print(json.dumps(result), flush=True)
    if result["ok"]:
        # Rank 0 serves the store, so it must exit last.
        dist.barrier()
        dist.destroy_process_group()
        return 0
    # Gloo's threads may still wait for a missing peer.
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
