# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keepers hear each other over a link that other connections fill in both directions, with long queues on its way."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import Lan, able
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper.test_keeper import Hosts

pytestmark = pytest.mark.skipif(
    not able(), reason="only root may make network namespaces, and only where the kernel lets it"
)
CONNECTIONS = 8
# Both ends send without end on each connection; the one that listens exits when it has received enough.
FLOOD = f"""
import os, socket, sys, threading, time
where, enough, got = ("10.9.0.1", 29777), float(sys.argv[2]), []
def call():
    while True:
        try:
            return socket.create_connection(where)
        except ConnectionRefusedError:
            time.sleep(0.05)
def send(link):
    while True:
        link.sendall(bytes(65536))
def receive(link):
    while sum(got) < enough:
        got.append(len(link.recv(65536)))
    os._exit(0)
server = socket.create_server(where) if sys.argv[1] == "listen" else None
for link in [server.accept()[0] if server else call() for dummy in range({CONNECTIONS})]:
    for work in (send, receive):
        threading.Thread(target=work, args=(link,)).start()
"""


@pytest.fixture
def lan(tmp_path):
    made = Lan(tmp_path / "lan")
    yield made
    made.close()


@pytest.fixture
def hosts(tmp_path, lan):
    made = Hosts(tmp_path, min_hosts=1)
    for number, node in enumerate(made.plan["nodes"]):
        node["address"] = f"10.9.0.{number + 1}"
    for number, host in enumerate(("desktop", "laptop")):
        made.start(host, below=lan.inside(number))
    yield made
    made.close()


# A full queue of 256 KB holds back everything for two seconds at 1 Mbit/s.
@pytest.mark.parametrize(("rate", "queue", "received"), [("1mbit", "256kb", 1_700_000), ("10mbit", "1mb", 6_000_000)])
def test_keepers_hear_each_other_over_a_saturated_link(lan, hosts, rate, queue, received):
    hosts.wait_for_training("laptop", "desktop", "laptop")
    for port in ("p0eth0", "p1eth0"):
        shape = ["qdisc", "replace", "dev", port, "root", "tbf", "rate", rate, "burst", "8kb", "limit", queue]
        subprocess.run(["tc", "-n", lan.switch, *shape], check=True)
    words = (sys.executable, "-c", FLOOD)
    listens = lan.start(0, *words, "listen", str(received))
    lan.start(1, *words, "call", "1e9")
    assert listens.wait(120) == 0
    for host in ("desktop", "laptop"):
        assert '"lost"' not in (hosts.folder / host / "members.jsonl").read_text()
        assert hosts.state(host)["generation"] == 1
