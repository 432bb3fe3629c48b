# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exchanges between ranks, and the error when a rank does not arrive."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import ranks
import torch

from nanochat.kit.common import Ranks, UserError, read_ranks
from nanochat.parallel.comm import Comm, CommError, connect

HERE = "test_comm"


def talk_much(comm: Comm) -> None:
    counts = []
    for number in range(40):
        comm.exchange("a fact", number)
        # Nobody is ahead of this.
        comm.barrier("the count")
        counts.append(comm.ask(lambda store: store.num_keys()))
    assert max(counts[5:]) <= counts[0] + 4 * comm.world


def test_the_store_does_not_grow_with_what_is_exchanged() -> None:
    ranks.passed(ranks.call(HERE, "talk_much", 2))


def test_a_missing_address_and_a_taken_port_are_named() -> None:
    for environ in ({}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, {"MASTER_ADDR": "x", "MASTER_PORT": "٣"}):
        with pytest.raises(UserError, match="MASTER_ADDR"):
            connect(Ranks(0, 0, 2), "cpu", 1.0, environ)
    for environ in ({"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}):
        with pytest.raises(UserError, match="RANK"):
            read_ranks(environ)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CommError, match=f"127.0.0.1:{port} .*another process holds that port"):
            connect(Ranks(0, 0, 2), "cpu", 1.0, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def vanish(comm: Comm, how: str) -> None:
    comm.enter("forward_backward", 7)
    comm.all_reduce(torch.ones(3), "a sum that all come to")
    # Only now: on a busy machine one process may start much later than another.
    comm.timeout = 4.0
    if comm.rank == comm.world - 1:
        comm.enter("data", 8)
        while json.loads(comm.ask(lambda store: store.get(f"at/{comm.rank}")))[2:4] != ["data", 8]:
            time.sleep(0.05)
        if how == "left":
            raise UserError("the shard is corrupt.")
        if how == "busy":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.enter("sync", 8)
    comm.all_reduce(torch.ones(3), "the gradients")


VERDICTS = {
    "killed": r"no heartbeat from rank {last} \(.*\), last seen in phase data of step 8",
    "busy": r"rank {last} \(.*\) did not arrive; it is alive and in phase data of step 8",
    "left": r"rank {last} \(.*\) failed: the shard is corrupt",
}


VANISHING = [("killed", 3), ("busy", 2), ("left", 2)]  # test_frozen.py freezes ranks


@pytest.fixture(scope="module")
def survivors() -> Iterator[dict[tuple[str, int], list[ranks.Result]]]:
    """All cases at once, since most of their time is waiting."""
    jobs = {(how, world): ranks.start(ranks.argv_of(HERE, "vanish", how), world) for how, world in VANISHING}
    yield {case: ranks.finish(processes[:-1]) for case, processes in jobs.items()}
    for processes in jobs.values():
        processes[-1].kill()
        ranks.finish(processes[-1:])


@pytest.mark.parametrize(("how", "world"), VANISHING)
def test_field_19_the_rank_that_did_not_come_is_named(
    how: str, world: int, survivors: dict[tuple[str, int], list[ranks.Result]]
) -> None:
    # A survivor of three ranks may hear only of the other survivor's end, and then repeats its message.
    pattern = VERDICTS[how].format(last=world - 1)
    for result in survivors[how, world]:
        assert result.code == 2, result
        assert "stopped in phase sync of step 8" in result.err
        assert "for the gradients" in result.err
        assert len(result.err.strip().splitlines()) == 1, result.err
        assert re.search(pattern, result.err), result.err


def test_a_rank_that_serves_the_store_and_never_starts_is_named() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    with pytest.raises(CommError, match="could not reach the rendezvous"):
        connect(Ranks(1, 0, 2), "cpu", 1.0, environ)


def suspend(after: float, seconds: float) -> None:
    """Stop this process after some time, for some seconds."""
    pause = f"sleep {after}; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", pause])


def suspended(comm: Comm, rank: int, seconds: float, timeout: float) -> None:
    comm.exchange("all are here", None)
    comm.timeout = timeout
    if comm.rank == rank:
        suspend(2, seconds)
    else:
        time.sleep(2 * seconds)
    comm.barrier("the other one")
    comm.timeout = 60.0


def suspended_in_connect() -> None:
    """Suspends the rank that serves the store while the other one looks for it or waits in it."""
    place = read_ranks()
    if place.rank == 0:
        suspend(0.5, 4)
    else:
        time.sleep(2)
    begun = time.monotonic()
    comm = connect(place, "cpu", 20.0)
    assert time.monotonic() - begun > 1, "it was not suspended meanwhile"
    comm.exchange("both are here", None)
    comm.close()


# Rank 1 for longer than ranks wait for one that has fallen silent; rank 0, which serves the store, while another waits in it.
@pytest.mark.parametrize(("rank", "seconds", "timeout"), [(1, 7, 4), (0, 4, 20)])
def test_a_suspended_rank_takes_its_own_silence_for_that_of_no_other(rank: int, seconds: int, timeout: int) -> None:
    ranks.passed(ranks.call(HERE, "suspended", 2, rank, seconds, timeout))


def test_the_rank_that_serves_the_store_may_be_suspended_while_ranks_meet() -> None:
    ranks.passed(ranks.finish(ranks.start(["-c", f"import {HERE}; {HERE}.suspended_in_connect()"], 2)))
