# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several hosts as folders of this machine, with the real server in between."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import chain
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server as shard_server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.chain import ShardPeer
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import PIECE, Manifest, ShardsError, part_of
from ansible_collections.nanochat.ddp.tests.integration.local import until
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import (
    SECRET,
    Host,
    all_at_once,
    describe,
    fill,
    parquet,
    server_settings,
)

BIG = 2 * PIECE + 1000  # three pieces


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts with or without a manifest to wait for, and stops all of them in the end."""
    made: list[Host] = []

    def make(*names: str, manifest: dict | None = None) -> list[Host]:
        made.extend(Host(tmp_path / name, manifest) for name in names)
        return made[-len(names) :]

    yield make
    for host in made:
        host.stop()


@pytest.fixture
def master(tmp_path, hosts):
    """Four shards, the first of several pieces."""
    fill(tmp_path / "master", shards=4)
    (tmp_path / "master/shard_00000.parquet").write_bytes(parquet(0, BIG))
    return hosts("master")[0]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [*folder.glob("[!.]*.*"), *folder.glob("tokenizer/*")]}


class Rogue(http.server.BaseHTTPRequestHandler):
    """A peer that answers every request as `how` says."""

    protocol_version = "HTTP/1.1"
    how = "wrong"
    asked: list[str]

    def do_HEAD(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        size = PIECE if self.path in ("/0/shard_00000.parquet", "/1/shard_00000.parquet") else 40_012
        self.close_connection = True
        if self.how == "nonsense":
            self.wfile.write(b"no HTTP at all\n")
            return
        self.send_response({"busy": 503, "none": 404}.get(self.how, 200))
        self.send_header("Content-Length", str(0 if self.how in ("busy", "none") else size + (self.how == "long")))
        self.end_headers()
        self.wfile.write({"wrong": b"\0" * size, "broken off": b"\0" * 1000}.get(self.how, b""))

    def log_message(self, *dummy) -> None:
        pass


@pytest.fixture
def rogue():
    """Starts such a peer; returns it and the requests that it gets."""
    servers = []

    def start(how: str) -> tuple[ShardPeer, list[str]]:
        asked: list[str] = []
        handler = type("OneRogue", (Rogue,), {"how": how, "asked": asked})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return ShardPeer("rogue", "127.0.0.1", server.server_port), asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_hosts_hand_on_what_they_have_not_received_whole(master, hosts):
    others = hosts("b", "c", "d", manifest=master.manifest)
    before = [master, *others]
    received: dict[str, dict[str, int]] = {}

    def pull(number: int) -> None:
        # The host before it is the only source: everything passes through all of them.
        received[others[number].folder.name] = others[number].pull(master.manifest, [before[number].peer])

    # The last one asks first, for what nobody before it has.
    assert all_at_once([lambda number=number: pull(number) for number in (2, 1, 0)]) == []

    total = sum(one.bytes for one in Manifest.read(master.manifest).files)
    assert received == {"b": {"master": total}, "c": {"b": total}, "d": {"c": total}}
    assert all(content(host.folder) == content(master.folder) for host in others)
    assert not list(others[0].folder.rglob("*.part"))


@pytest.mark.parametrize("right", [True, False], ids=["right beginning", "wrong beginning"])
def test_a_cut_transfer_goes_on_behind_the_pieces_that_are_right(master, hosts, right):
    other = hosts("b", manifest=master.manifest)[0]
    big, small = Manifest.read(master.manifest).files[:2]
    begun = content(master.folder)[big.path][: PIECE + 30_000]
    Path(part_of(str(other.folder), big)).write_bytes(begun if right else b"x" + begun[1:])
    Path(part_of(str(other.folder), small)).write_bytes(b"x" * 90_000)  # longer than the file
    (master.folder / "tokenizer/token_bytes.pt").write_bytes(b"")  # and an empty one
    manifest = describe(master.folder)
    master.stop()
    again = hosts("master", manifest=manifest)[0]

    received = other.pull(manifest, [again.peer])

    assert content(other.folder) == content(master.folder)
    total = sum(one.bytes for one in Manifest.read(manifest).files)
    assert received == {"master": total - (PIECE if right else 0)}


@pytest.mark.parametrize("how", ["wrong", "broken off", "long", "nonsense", "none", "busy", "gone"])
def test_a_source_that_sends_anything_but_right_pieces_is_passed_over(master, hosts, rogue, how):
    other, away = hosts("b", "gone", manifest=master.manifest)
    away.stop()
    peer, asked = (away.peer, []) if how == "gone" else rogue(how)

    received = other.pull(master.manifest, [peer, master.peer], patience=2.0 if how == "busy" else 10.0)

    assert content(other.folder) == content(master.folder)
    assert set(received) == {"master"} and (len(asked) <= 1 or how == "busy")


def test_a_slow_source_is_left_out(master, hosts, rogue, monkeypatch):
    monkeypatch.setattr(chain, "AHEAD", 1)
    fast, other = hosts("fast", "b", manifest=master.manifest)
    fast.pull(master.manifest, [master.peer])
    slow = rogue("busy")[0]

    # It need not wait for the slow one first.
    received = other.pull(master.manifest, [slow, fast.peer, master.peer], patience=600)

    assert content(other.folder) == content(master.folder) and set(received) == {"fast"}


def test_trouble_of_the_only_sources_is_named(master, hosts, rogue):
    other = hosts("b", manifest=master.manifest)[0]
    master.stop()

    told = r"^6 files could not be copied .*asked master, rogue: master: .*Connection refused.*rogue: piece 0.*wrong digest"
    with pytest.raises(ShardsError, match=told):
        other.pull(master.manifest, [rogue("wrong")[0], master.peer], patience=1.0)
    assert not list(other.folder.glob("*.parquet"))


def test_shard_that_changed_after_it_was_described_is_not_handed_on(master, hosts):
    other = hosts("b")[0]
    shard = master.folder / "shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")

    with pytest.raises(
        ShardsError, match=r"1 file could not be copied \(shard_00001.parquet\); asked master: none of them has a copy"
    ):
        other.pull(master.manifest, [master.peer], patience=1.0)
    assert (other.folder / "shard_00003.parquet").exists()


def ask(peer: ShardPeer, path: str, secret: str) -> int:
    connection = http.client.HTTPConnection(peer.address, peer.port, timeout=5)
    try:
        connection.request("GET", path, headers={shard_server.PROOF: shard_server.proof(secret, path)})
        return connection.getresponse().status
    finally:
        connection.close()


def test_server_answers_only_who_knows_the_secret(master):
    for path, secret, status in (("/0/shard_00000.parquet", SECRET, 200), ("/0/shard_00000.parquet", "guessed", 403)):
        assert ask(master.peer, path, secret) == status


def test_server_gives_nothing_but_pieces_of_described_files(master):
    for path in (".share/server.json", "../master/manifest.json", "/etc/passwd", "shard_00009.parquet"):
        assert ask(master.peer, f"/0/{path}", SECRET) == 404
    for path in ("/", "/x/shard_00000.parquet", "/3/shard_00000.parquet", "/-1/shard_00000.parquet"):
        assert ask(master.peer, path, SECRET) == 404


def test_server_hangs_up_on_strangers(tmp_path):
    state = shard_server.start(server_settings(tmp_path, allow=["192.0.2.1"]))
    try:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(ShardPeer("a", "127.0.0.1", state["port"]), "/0/shard_00000.parquet", SECRET)
    finally:
        shard_server.stop(shard_server.place_of(str(tmp_path), SECRET))


def test_secret_is_in_no_file(master):
    place = Path(master.place)
    assert place.parent.stat().st_mode & 0o077 == 0 and place.stat().st_mode & 0o077 == 0
    assert SECRET not in place.read_text()
    assert SECRET.encode() not in Path(f"/proc/{json.loads(place.read_text())['pid']}/cmdline").read_bytes()


def test_stop_leaves_a_process_alone_that_only_has_the_pid(hosts):
    place = Path(hosts("a")[0].place)
    state = json.loads(place.read_text())
    place.write_text(json.dumps({**state, "pid": os.getpid()}))

    shard_server.stop(str(place))

    # Its state is gone, so the server ends by itself.
    assert until(lambda: not processes.alive(state["pid"], state["pid_start"]), 10)


def test_two_transfers_of_one_folder_do_not_end_each_other(tmp_path):
    """As of two controllers, or of a play that goes on while the next one starts."""
    other = "o" * 40
    places = [shard_server.place_of(str(tmp_path), secret) for secret in (SECRET, other)]
    states = [shard_server.start(server_settings(tmp_path, secret=secret)) for secret in (SECRET, other)]
    try:
        assert [shard_server.running(place) for place in places] == states
        shard_server.stop(places[1])
        assert ask(ShardPeer("a", "127.0.0.1", states[0]["port"]), "/0/shard_00000.parquet", SECRET) == 404
    finally:
        for place in places:
            shard_server.stop(place)
    assert not (tmp_path / ".share").exists()


def test_a_server_ends_when_nobody_asks_and_what_it_left_goes_with_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_server, "IDLE_SECONDS", 0)
    shard_server.start(server_settings(tmp_path))
    gone = shard_server.place_of(str(tmp_path), SECRET)
    assert until(lambda: shard_server.running(gone) is None, 10)
    place = shard_server.place_of(str(tmp_path), "o" * 40)
    shard_server.start(server_settings(tmp_path, secret="o" * 40))
    try:
        assert shard_server.places(str(tmp_path)) == [place]
    finally:
        shard_server.stop(place)


def test_address_of_another_host_is_named(tmp_path):
    settings = server_settings(tmp_path, address="192.0.2.7", low=40000, high=40010)

    with pytest.raises(ShardsError, match=r"^the shard server cannot listen on 192.0.2.7 ports 40000-40010"):
        shard_server.start(settings)


def test_port_is_taken_from_the_range(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with shard_server.bound(server_settings(tmp_path, low=port, high=port + 50)) as server:
            assert port < server.server_address[1] <= port + 50
        with pytest.raises(ShardsError, match="Address already in use"):
            shard_server.bound(server_settings(tmp_path, low=port, high=port))
