# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Links that are tried with real sockets of this machine."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import alive, start_ticks
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import peer_check as check_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.peer_check import (
    peer_check,
    start_responder,
    stop_responder,
)

HOST = "127.0.0.1"


@pytest.fixture
def listening(call):
    """Starts a responder and ends it with the test."""
    started = []

    def start(**options):
        wanted = {"address": HOST, "rendezvous_port": 0, "others": [], "low": 32768, "high": 60999, "seconds": 20}
        result = call(start_responder, **{**wanted, **options})
        if result.get("responder"):
            started.append(result["responder"])
        return result

    yield start
    for responder in started:
        stop_responder(responder["pid"], responder["started"])


def check(call, responder, address=HOST, **options):
    peer = {"address": address, "ports": responder["ports"], "token": responder["token"]}
    return call(peer_check, address=address, peers=[peer], **options)["links"][0]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_way_that_is_open_is_measured(call, listening, address):
    if address == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    result = listening(address=address)
    link = check(call, result["responder"], address)
    assert result["changed"] is False
    assert [port["error"] for port in link["ports"]] == [""] * 3
    assert link["bandwidth_mbit"] > 1
    assert 0 < link["latency_ms"] < 1000


def test_both_ends_of_the_range_are_tried(listening):
    ports = listening(low=40000, high=49999)["responder"]["ports"]
    assert all(40000 <= port <= 49999 for port in ports)
    # An end may be in use on this machine, but hardly both.
    assert {40000, 49999} & set(ports)


def test_no_rate_is_measured_where_none_is_wanted(call, listening):
    responder = listening()["responder"]
    unwanted = check(call, responder, rates=False)
    assert unwanted["latency_ms"] > 0 and unwanted["bandwidth_mbit"] is None and not unwanted["error"]


def test_a_refused_port_is_a_result(call, listening):
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        link = check(call, {"ports": [closed.getsockname()[1]], "token": "x"})
    assert link["ports"][0]["error"] == "refused"
    assert link["bandwidth_mbit"] is None


def test_a_stranger_on_the_port_is_told_from_a_closed_way(call):
    with socket.create_server((HOST, 0)) as stranger:

        def hang_up():
            stranger.accept()[0].close()

        answering = threading.Thread(target=hang_up)
        answering.start()
        link = check(call, {"ports": [stranger.getsockname()[1]], "token": "x"})
        answering.join(5)
    assert link["ports"][0]["error"] in ("another program answers there", "cut off")


def test_who_does_not_know_the_token_gets_nothing(listening):
    responder = listening()["responder"]
    with socket.create_connection((HOST, responder["ports"][0]), 5) as connection:
        connection.sendall(f"NANOCHAT-DDP-CHECK {'0' * 32}\n".encode())
        assert connection.recv(100) == b""


def test_field_06_a_rendezvous_port_that_somebody_holds_is_left_out(listening):
    with socket.create_server((HOST, 0)) as held:
        result = listening(rendezvous_port=held.getsockname()[1])
        # The plan names its holder; the data ports are tried all the same.
        assert held.getsockname()[1] not in result["responder"]["ports"] and len(result["responder"]["ports"]) == 3


def test_a_port_that_a_policy_denies_is_told_and_not_taken_for_one_in_use(listening, monkeypatch):
    def denied(address, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", denied)
    result = listening(rendezvous_port=29500)
    assert result["failed"] and "cannot listen on 127.0.0.1 port 29500: Permission denied" in result["msg"]


def test_the_process_ends_when_it_is_told(call, listening):
    responder = listening()["responder"]
    assert alive(responder["pid"], responder["started"])
    its = {"pid": responder["pid"], "started": responder["started"]}
    assert call(stop_responder, **its)["stopped"] is True
    assert not alive(responder["pid"], responder["started"])
    assert call(stop_responder, **its)["stopped"] is False


def test_a_process_that_an_interrupted_play_left_behind_is_ended(listening, monkeypatch):
    """As after Ctrl-C in a preflight, when the same command is given again."""
    monkeypatch.setattr(check_utils, "STALE_SECONDS", 0.5)
    first = listening()["responder"]
    port = first["ports"][0]
    (holder,) = [one.process for one in processes.port_holders([port])]
    assert (holder.pid, holder.command) == (first["pid"], processes.PORT_CHECK)
    assert listening(rendezvous_port=port)["responder"]["ports"][0] == port
    assert not alive(first["pid"], first["started"])


def test_a_process_that_another_controller_uses_is_waited_for_and_stays(listening, monkeypatch):
    first = listening()["responder"]
    monkeypatch.setattr(check_utils.wait_for_checks, "__defaults__", (0.5,))
    assert first["ports"][0] not in listening(rendezvous_port=first["ports"][0])["responder"]["ports"]
    assert alive(first["pid"], first["started"])


def test_the_process_ends_by_itself(listening):
    with os.fdopen(os.pidfd_open(listening(seconds=1)["responder"]["pid"])) as process:
        assert select.select([process], [], [], 5)[0]


def test_another_process_with_that_number_is_never_signalled(call):
    mine = {"pid": os.getpid(), "started": start_ticks(os.getpid()) + 1}
    assert call(stop_responder, **mine)["stopped"] is False
