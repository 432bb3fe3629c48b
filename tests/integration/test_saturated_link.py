# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Over a link that other connections fill in both directions, with long queues on its way, keepers hear each other; ranks pace
themselves, and leave it to ssh."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper.test_keeper import Hosts

# Both ends send without end on each connection; the one that listens exits when it has received enough.
FLOOD = f"""
import os, socket, sys, threading, time
role, enough, connections, paced = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "paced"
where, got = ("10.9.0.1", 29777), []
if paced:
    sys.path.insert(0, {str(ROOT / "trainer")!r})
    from nanochat.kit.connections import start_pacing
    start_pacing()
def call():
    while True:
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:
            time.sleep(0.05)
def send(link):
    if paced:  # cubic is what most systems have; others may keep queues short by themselves
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    while True:
        link.sendall(bytes(65536))
def receive(link):
    while sum(got) < enough:
        got.append(len(link.recv(65536)))
    os._exit(0)
server = socket.create_server(where) if role == "listen" else None
for link in [server.accept()[0] if server else call() for dummy in range(connections)]:
    for work in (send, receive):
        threading.Thread(target=work, args=(link,)).start()
"""
# As with ssh: a key is pressed twice a second, and its echo comes back.
ECHO = """
import socket
link = socket.create_server(("10.9.0.1", 29778)).accept()[0]
while key := link.recv(1):
    link.sendall(key)
"""
TYPE = """
import socket, sys, time
while True:
    try:
        link = socket.create_connection(("10.9.0.1", 29778))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
begun = now = time.monotonic()
while now < begun + float(sys.argv[1]):
    pressed = time.monotonic()
    link.sendall(b"x")
    link.recv(1)
    now = time.monotonic()
    print(now - pressed)
    time.sleep(0.5)
"""


@pytest.fixture
def hosts(tmp_path, lan):
    made = Hosts(tmp_path)
    for number, node in enumerate(made.plan["nodes"]):
        node["address"] = f"10.9.0.{number + 1}"
    for number, host in enumerate(("desktop", "laptop")):
        made.start(host, below=lan.inside(number))
    yield made
    made.close()


def slow_down(lan, rate, queue):
    for port in ("p0eth0", "p1eth0"):
        shape = ["qdisc", "replace", "dev", port, "root", "tbf", "rate", rate, "burst", "8kb", "limit", queue]
        subprocess.run(["tc", "-n", lan.switch, *shape], check=True)


def flood(lan, received, connections, pace):
    """Fill the link; the process that ends when it has received so much."""
    words = (sys.executable, "-c", FLOOD)
    listens = lan.start(0, *words, "listen", str(received), str(connections), pace)
    lan.start(1, *words, "call", "1e9", str(connections), pace)
    return listens


# Unpaced, two to four seconds and more than one; on a busy machine paced ones take longer, too.
ECHO_SECONDS = {"1mbit": 1.8, "10mbit": 0.8}


# A full queue of 256 KB holds back everything for two seconds at 1 Mbit/s.
@pytest.mark.parametrize(
    ("rate", "queue", "received"),
    [("1mbit", "256kb", 1_700_000), pytest.param("10mbit", "1mb", 6_000_000, marks=pytest.mark.long)],
)
def test_keepers_hear_each_other_over_a_saturated_link(lan, hosts, rate, queue, received):
    hosts.wait_for_training("laptop", "desktop", "laptop")
    slow_down(lan, rate, queue)
    listens = flood(lan, received, 8, "unpaced")
    assert listens.wait(120) == 0
    for host in ("desktop", "laptop"):
        assert '"lost"' not in (hosts.folder / host / "members.jsonl").read_text()
        assert hosts.state(host)["generation"] == 1


# Half a minute at full speed.
@pytest.mark.long
@pytest.mark.parametrize(("rate", "queue", "received"), [("1mbit", "256kb", 3_500_000), ("10mbit", "1mb", 35_000_000)])
def test_ranks_that_fill_a_link_leave_it_to_ssh(lan, rate, queue, received):
    slow_down(lan, rate, queue)
    # As ranks send: on one connection, paced.
    listens = flood(lan, received, 1, "paced")
    lan.start(0, sys.executable, "-c", ECHO)
    echoes = [float(line) for line in lan.run(1, sys.executable, "-c", TYPE, "25").split()]
    # It takes some seconds to find the link's rate.
    assert statistics.median(echoes[len(echoes) // 2 :]) < ECHO_SECONDS[rate]
    # They still fill most of it.
    assert listens.wait(30) == 0
