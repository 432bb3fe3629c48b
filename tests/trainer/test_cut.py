# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A pulled cable: nothing is closed or refused, but packets stop arriving. Two network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ranks

from nanochat.parallel.comm import Comm

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def wait_for_the_other(comm: Comm) -> None:
    comm.exchange("all are here", None)
    comm.timeout = 6.0
    print("met", flush=True)
    if comm.rank == 0:
        time.sleep(20)
    # Rank 1's message for the first barrier may still arrive.
    for what in ("the cut", "what never comes"):
        comm.barrier(what)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    names = (f"nc{os.getpid()}a", f"nc{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may make network namespaces, and only where the kernel lets it")
    try:
        ip("link", "add", "cut0", "netns", names[0], "type", "veth", "peer", "name", "cut0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cut0")
            ip("-n", name, "link", "set", "cut0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.long
def test_field_31_a_pulled_cable_does_not_block_ranks_in_the_store(spaces: tuple[str, str]) -> None:
    port = ranks.free_port()
    processes = []
    for rank, space in enumerate(spaces):
        environ = ranks.environment(rank, 2, port, {"GLOO_SOCKET_IFNAME": "cut0", "MASTER_ADDR": ADDRESSES[0]})
        argv = ["ip", "netns", "exec", space, sys.executable, *ranks.argv_of("test_cut", "wait_for_the_other")]
        processes.append(subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "met\n"
    ip("-n", spaces[0], "link", "set", "cut0", "down")
    first, second = ranks.finish(processes, 120)
    assert (first.code, second.code) == (2, 2), f"{first.err}\n{second.err}"
    assert ranks.last_json(first.out) == {"cause": "peer-lost", "blames": [1]}
    assert ranks.last_json(second.out) == {"cause": "store-lost", "blames": [0]}
