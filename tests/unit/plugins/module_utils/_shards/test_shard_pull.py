# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several hosts as folders of this machine, with the real server in between."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import pull
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server as shard_server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import share as shard_share
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests, ShardsError, entries
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.pull import ShardPeer, part_of
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import (
    SECRET,
    Host,
    all_at_once,
    fill,
    parquet,
    server_settings,
)


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts, and stops all of them in the end."""
    made: list[Host] = []

    def make(*names: str) -> list[Host]:
        made.extend(Host(tmp_path / name) for name in names)
        return made[-len(names) :]

    yield make
    for host in made:
        host.stop()


@pytest.fixture
def master(tmp_path, hosts):
    fill(tmp_path / "master", shards=4)
    return hosts("master")[0]


def same(one: Path, other: Path) -> bool:
    return {
        path.name: path.read_bytes() for path in one.rglob("[!.]*") if path.is_file() and ".share" not in str(path)
    } == {path.name: path.read_bytes() for path in other.rglob("[!.]*") if path.is_file() and ".share" not in str(path)}


class Rogue(http.server.BaseHTTPRequestHandler):
    """A peer that offers everything and sends what `how` says: wrong bytes, or half of the right ones."""

    how = "wrong"
    files: dict

    def do_GET(self) -> None:
        body = json.dumps({"files": self.files}).encode()
        if self.path != "/have":
            size = self.files[self.path[len("/files/") :]]["bytes"]
            body = b"\0" * size
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.write(body if self.how == "wrong" else parquet(0)[: size // 2])
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *dummy) -> None:
        pass


@pytest.fixture
def rogue():
    """Starts such a peer."""
    servers = []

    def start(manifest: dict, how: str, files: object = None) -> ShardPeer:
        offered = {one.path: {"bytes": one.bytes, "sha256": one.sha256, "times": 0} for one in entries(manifest)}
        handler = type("OneRogue", (Rogue,), {"how": how, "files": offered if files is None else files})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return ShardPeer("rogue", "127.0.0.1", server.server_port)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_three_hosts_end_up_alike(master, hosts):
    others = hosts("b", "c")
    everyone = [host.peer for host in [master, *others]]

    raised = all_at_once([lambda host=host: host.pull(master.manifest, everyone) for host in others])

    assert raised == []
    assert all(same(master.folder, host.folder) for host in others)
    assert not list(others[0].folder.rglob("*.part"))


def test_no_source_sends_everything_to_everyone(tmp_path, hosts):
    fill(tmp_path / "first", shards=10, size=300_000)
    first = hosts("first")[0]
    others = hosts("b", "c", "d", "e", "f")
    everyone = [host.peer for host in [first, *others]]

    raised = all_at_once([lambda host=host: host.pull(first.manifest, everyone) for host in others])

    assert raised == []
    total = sum(one.bytes for one in entries(first.manifest))  # type: ignore[misc]
    sent = {host.folder.name: sum(host.stop().values()) for host in [first, *others]}
    assert sum(sent.values()) == pytest.approx(total * len(others), rel=0.05)
    # Without handing on, the first would send five times the data set, and the others nothing.
    assert max(sent.values()) < 3 * total


@pytest.mark.parametrize(
    ("begun", "times"), [(parquet(0)[:30_000], 1), (b"x" * 30_000, 2)], ids=["right beginning", "wrong beginning"]
)
def test_cut_transfer_goes_on_where_it_ended_and_begins_again_if_that_was_wrong(master, hosts, begun, times):
    other = hosts("b")[0]
    entry = entries(master.manifest)[0]
    Path(part_of(str(other.folder), entry)).write_bytes(begun)

    other.pull(master.manifest, [master.peer])

    assert same(master.folder, other.folder)
    assert master.stop()[entry.path] == times * entry.bytes - 30_000


def test_empty_and_overlong_files_arrive_right(tmp_path, hosts):
    fill(tmp_path / "first")
    (tmp_path / "first/tokenizer/token_bytes.pt").write_bytes(b"")
    first, other = hosts("first", "b")
    entry = entries(first.manifest)[0]
    Path(part_of(str(other.folder), entry)).write_bytes(b"x" * 90_000)

    other.pull(first.manifest, [first.peer])

    assert same(first.folder, other.folder)


@pytest.mark.parametrize("how", ["wrong", "half"])
def test_peer_with_wrong_or_too_few_bytes_does_no_harm(master, hosts, rogue, how):
    other = hosts("b")[0]

    pulled = other.pull(master.manifest, [rogue(master.manifest, how), master.peer])

    assert same(master.folder, other.folder)
    assert set(pulled) >= {"master"}


@pytest.mark.parametrize(
    "files",
    [
        {"shard_00000.parquet": 5}, {"shard_00000.parquet": {"sha256": []}}, {"shard_00000.parquet": {}}, ["shard_00000.parquet"], "x", 7,
        {"shard_00000.parquet": {"bytes": 1, "sha256": "0a" * 32, "times": "often"}},
        {"../../evil": {"bytes": 1, "sha256": "0a" * 32, "times": 0}},
    ],
    ids=lambda files: ascii(files)[:50],
)  # fmt: skip
def test_a_hostile_source_that_tells_nonsense_of_its_files_does_no_harm(master, hosts, rogue, files):
    other = hosts("b")[0]

    pulled = other.pull(master.manifest, [rogue(master.manifest, "wrong", files), master.peer])

    assert set(pulled) == {"master"} and same(master.folder, other.folder)


def test_wrong_bytes_from_the_only_source_are_named(master, hosts, rogue):
    other = hosts("b")[0]

    with pytest.raises(
        ShardsError, match=r"^b: 6 files could not be copied .*asked rogue: .*arrived whole.*wrong digest"
    ):
        other.pull(master.manifest, [rogue(master.manifest, "wrong")], patience=1.0)
    assert not list(other.folder.glob("*.parquet"))


def test_silent_peer_is_named(master, hosts):
    master.stop()
    other = hosts("b")[0]

    with pytest.raises(ShardsError, match=rf"master: 127.0.0.1:{master.peer.port}: connection refused"):
        other.pull(master.manifest, [master.peer], patience=0.5)


def test_shard_that_changed_after_it_was_described_is_not_handed_on(master, hosts):
    other = hosts("b")[0]
    shard = master.folder / "shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")

    with pytest.raises(
        ShardsError, match=r"1 file could not be copied \(shard_00001.parquet\); asked master: none of them has a copy"
    ):
        other.pull(master.manifest, [master.peer], patience=1.0)


def ask(peer: ShardPeer, path: str, secret: str, **headers: str) -> int:
    connection = http.client.HTTPConnection(peer.address, peer.port, timeout=5)
    headers[shard_server.PROOF] = shard_server.proof(secret, "GET", path, headers.get("Range", ""))
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_server_answers_only_who_knows_the_secret(master):
    assert ask(master.peer, "/have", SECRET) == 200
    assert ask(master.peer, "/have", "guessed") == 403
    assert ask(master.peer, "/files/shard_00000.parquet", "guessed") == 403


@pytest.mark.parametrize(
    "path", ["/files/.share/server.json", "/files/../master/manifest.json", "/files//etc/passwd", "/"]
)
def test_server_gives_nothing_but_described_files(master, path):
    assert ask(master.peer, path, SECRET) == 404


def test_a_range_beyond_the_end_is_refused(master):
    size = (master.folder / "shard_00000.parquet").stat().st_size
    for begin, status in ((size - 1, 206), (size + 1, 416)):
        assert ask(master.peer, "/files/shard_00000.parquet", SECRET, Range=f"bytes={begin}-") == status


def test_server_hangs_up_on_strangers(tmp_path):
    (tmp_path / "a").mkdir()
    state = shard_share.start(server_settings(tmp_path / "a", allow=["192.0.2.1"]))
    try:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(ShardPeer("a", "127.0.0.1", state["port"]), "/have", SECRET)
    finally:
        shard_share.stop(shard_share.place_of(str(tmp_path / "a"), SECRET))


def test_old_news_are_sent_away_for_new_ones(master):
    path = "/files/shard_00000.parquet"
    assert ask(master.peer, path, SECRET, **{shard_server.TIMES: "0"}) == 200
    assert ask(master.peer, path, SECRET, **{shard_server.TIMES: "0"}) == 503


def test_secret_is_in_no_argv_and_no_readable_file(master):
    assert SECRET.encode() not in Path(f"/proc/{master.pid}/cmdline").read_bytes()
    share = Path(shard_share.place_of(str(master.folder), SECRET))
    assert share.parent.stat().st_mode & 0o077 == 0
    assert share.stat().st_mode & 0o077 == 0
    assert (share / "server.json").stat().st_mode & 0o077 == 0
    assert SECRET in (share / "server.json").read_text()


def ended(folder: Path) -> bool:
    """Whether the folder's server is gone, or goes soon."""
    deadline = time.monotonic() + 10
    while shard_share.running(shard_share.place_of(str(folder), SECRET)) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def test_stop_leaves_a_process_alone_that_only_has_the_pid(tmp_path):
    Host(tmp_path / "a")
    place = shard_share.place_of(str(tmp_path / "a"), SECRET)
    state_file = Path(place, "server.state")
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "pid": os.getpid()}))

    assert shard_share.stop(place) is None

    state_file.parent.mkdir(parents=True)
    state_file.write_text(json.dumps(state))
    # Its settings are gone, so the server ends by itself.
    assert ended(tmp_path / "a")


def test_two_transfers_of_one_folder_do_not_end_each_other(tmp_path):
    """As of two controllers, or of a play that goes on while the next one starts."""
    fill(tmp_path / "a")
    folder, other = str(tmp_path / "a"), "o" * 40
    states = [shard_share.start(server_settings(tmp_path / "a", secret=secret)) for secret in (SECRET, other)]
    places = [shard_share.place_of(folder, secret) for secret in (SECRET, other)]
    try:
        assert [shard_share.running(place)["pid"] for place in places] == [state["pid"] for state in states]
        assert ask(ShardPeer("a", "127.0.0.1", states[0]["port"]), "/have", SECRET) == 200
        shard_share.stop(places[1])
        assert shard_share.running(places[0]) is not None
        assert ask(ShardPeer("a", "127.0.0.1", states[0]["port"]), "/have", SECRET) == 200
    finally:
        for place in places:
            shard_share.stop(place)
    assert not (tmp_path / "a/.share").exists()


def test_a_server_ends_when_nobody_asks_and_what_it_left_goes_with_the_next_start(tmp_path):
    folder, other = tmp_path / "a", "o" * 40
    folder.mkdir()
    shard_share.start(server_settings(folder, idle=0))
    assert ended(folder)
    place = shard_share.place_of(str(folder), other)
    shard_share.start(server_settings(folder, secret=other))
    try:
        assert shard_share.places(str(folder)) == [place]
    finally:
        shard_share.stop(place)


def test_address_of_another_host_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    settings = server_settings(tmp_path / "a", host="worker", address="192.0.2.7", low=40000, high=40010)

    with pytest.raises(ShardsError, match=r"^worker: the shard server cannot listen on 192.0.2.7 ports 40000-40010"):
        shard_share.start(settings)


def test_port_is_taken_from_the_range(tmp_path):
    (tmp_path / "a").mkdir()
    taken = shard_server.Server("127.0.0.1", 0, shard_server.ServedFiles(""), SECRET, [])
    port = taken.server_port
    server = shard_server.bind("127.0.0.1", port, port + 50, shard_server.ServedFiles(""), SECRET, [])
    try:
        assert port < server.server_port <= port + 50
    finally:
        server.server_close()
        taken.server_close()


def test_ipv4_inside_ipv6_is_one_address():
    assert shard_server.plain_address("::ffff:192.0.2.1") == "192.0.2.1"
    assert shard_server.plain_address("fe80::1%eth0") == "fe80::1"


def test_digests_learnt_while_pulling_are_kept(master, hosts):
    other = hosts("b")[0]
    other.pull(master.manifest, [master.peer])

    digests = Digests(str(other.folder))
    assert [digests.of(one.path) for one in entries(master.manifest)] == entries(master.manifest)
    assert digests.hashed_bytes == 0


@pytest.mark.parametrize(
    ("over", "news", "least", "most"), [(False, False, 0.5, 5), (True, False, 0, 0.4), (False, True, 0.1, 0.45)]
)
def test_peers_are_asked_again_after_a_while_and_sooner_where_there_is_news(monkeypatch, over, news, least, most):
    monkeypatch.setattr(pull, "ASK_SOON_SECONDS", 0.1)
    swarm = SimpleNamespace(is_over=lambda: over, news_wanted=threading.Event())
    if news:
        swarm.news_wanted.set()
    begun = time.monotonic()
    pull._wait(swarm, 0.5)
    assert least <= time.monotonic() - begun < most
    assert not swarm.news_wanted.is_set()
