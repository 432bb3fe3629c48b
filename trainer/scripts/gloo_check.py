# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real all-reduce among all ranks with short timeouts: does Gloo work between these hosts, and how fast?

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=192.168.1.10 MASTER_PORT=29500 python -m scripts.gloo_check --timeout 20

Run it on all hosts at once, as above or under torchrun. They meet as the ranks of a training do. Prints one JSON object; exits 0
on success.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nanochat.kit.common import UserError, leave, read_ranks
from nanochat.parallel.comm import Comm, connect
from nanochat.rules.causes import Cause

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Messages at once, about as many as a small model's step has, and so small that a line's rate does not count.
MESSAGES, MESSAGE_FLOATS = 20, 16
# How often they are sent where they are quick, in how long; and how often where they are slow.
MOST_SWAPS, SWAP_SECONDS, FEWEST_SWAPS = 200, 0.5, 20
LARGE_ROUNDS, LARGE_FLOATS = 3, 2**21
# The large tensor takes too long where this part of it takes longer; then the part is what is measured.
PART, PART_SECONDS = 8, 0.5


def meet(environ: Mapping[str, str], timeout: float) -> Comm:
    """Rendezvous and full mesh.

    Ranks reach the rendezvous after importing PyTorch, which on a busy or slow host takes longer than everything here:
    NANOCHAT_START_SECONDS limits how long the others wait for them.
    """
    if missing := [name for name in VARIABLES if name not in environ]:
        raise UserError(f"{', '.join(missing)} must be set.")
    patience = max(timeout, float(environ.get("NANOCHAT_START_SECONDS") or 0))
    # Keys of its own in the store, should that be a training's.
    comm = connect(read_ranks(environ), "cpu", patience, {**environ, "TORCHELASTIC_RUN_ID": "gloo-check"})
    comm.timeout = timeout
    return comm


def measure(comm: Comm) -> dict[str, float]:
    """Milliseconds of a small message, and Mbit/s sent per rank during large all-reduces."""
    if comm.world == 1:
        return {"message_ms": 0.0, "bandwidth_mbit": 0.0}
    # All ranks must decide alike.
    slowest = max(comm.exchange("the seconds of messages", timed(comm, lambda: swap(comm))))
    swaps = max(FEWEST_SWAPS, min(MOST_SWAPS, int(SWAP_SECONDS / slowest)))
    # The lower quartile: the median varies threefold from one start to the next, this by a quarter.
    message = statistics.quantiles(timed(comm, lambda: swap(comm)) for dummy in range(swaps))[0] / MESSAGES
    bulk, summed = measure_bulk(comm, torch.ones(LARGE_FLOATS))
    sent = 2 * (comm.world - 1) * summed / comm.world
    return {"message_ms": round(message * 1000, 3), "bandwidth_mbit": round(sent * 8 / bulk / 1e6, 1)}


def measure_bulk(comm: Comm, large: torch.Tensor) -> tuple[float, int]:
    """The seconds of a large all-reduce, and its bytes."""
    part = large[: max(1, len(large) // PART)]
    sum_up(comm, part)
    # All ranks must decide alike.
    slowest = max(comm.exchange("the seconds of a part", timed(comm, lambda: sum_up(comm, part))))
    if slowest > PART_SECONDS:
        return slowest, part.nbytes
    return min(timed(comm, lambda: sum_up(comm, large)) for dummy in range(LARGE_ROUNDS)), large.nbytes


def sum_up(comm: Comm, tensor: torch.Tensor) -> None:
    comm.all_reduce(tensor, "a timed sum")


def swap(comm: Comm) -> None:
    """Messages to the next rank and from the one before, started at once like those of a step."""
    mine, theirs = torch.ones(MESSAGES, MESSAGE_FLOATS), torch.empty(MESSAGES, MESSAGE_FLOATS)
    before, behind = (comm.rank - 1) % comm.world, (comm.rank + 1) % comm.world
    received = [comm.receive(one, before, tag, "a message") for tag, one in enumerate(theirs)]
    comm.wait(*received, *(comm.send(one, behind, tag, "a message") for tag, one in enumerate(mine)))


def timed(comm: Comm, work: Callable[[], None]) -> float:
    """The seconds of something that all ranks do at the same time."""
    comm.all_reduce(torch.zeros(1), "a common start")
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run and time an all-reduce among all ranks.")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to wait for the other ranks")
    options, comm = parser.parse_args(argv), None
    # How far it got.
    result: dict[str, Any] = {"ok": False, "phase": "rendezvous", "error": ""}
    try:
        comm = meet(os.environ, options.timeout)
        result["phase"] = "all-reduce"
        one = torch.arange(4096, dtype=torch.float32)
        total = comm.all_reduce(one * (comm.rank + 1), "a known sum")
        if not torch.equal(total, one * (comm.world * (comm.world + 1) // 2)):
            raise UserError("the sum is wrong: ranks of different runs may have mixed.")
        result.update(measure(comm), ok=True, phase="done")
    except UserError as error:
        result["error"] = str(error).rstrip(".")
        if comm is not None:
            comm.give_up(str(error), error.cause, error.blames)
        elif error.cause is Cause.LINK_LOST:
            result["phase"] = "connecting"
    print(json.dumps(result), flush=True)
    if not result["ok"] or comm is None:
        # Gloo's threads may still wait for a missing peer.
        leave(1)
    with contextlib.suppress(UserError):
        comm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
