# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads from a server on this machine which cuts, lies, refuses and recovers."""

from __future__ import annotations

import hashlib
import http.server
import threading

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import url as shard_url
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests, ShardsError
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.url import Collection, fetch_all, name_of
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import parquet


class Site:
    """The server's files, its behaviour for the next requests of a path, and the requests it got."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list] = {}
        self.ranges: list[tuple[str, str]] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.knows_ranges = True
        self.url = ""


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/elsewhere/"):
            self.send_response(302)
            self.send_header("Location", f"{self.site.url}/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.site.ranges.append((name, self.headers.get("Range", "")))
        faults = self.site.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            self.send_error(fault)
        elif fault == "page":
            self._send(200, b"<html>Sign in to the hotel's network</html>", {})
        elif name in self.site.files:
            self._send_file(name, cut=fault == "cut")
        else:
            self.send_error(404)

    def _send_file(self, name: str, cut: bool) -> None:
        body = self.site.files[name]
        headers = dict(self.site.headers.get(name, {}))
        wanted = self.headers.get("Range") if self.site.knows_ranges else None
        begin = int(wanted[len("bytes=") : -1]) if wanted else 0
        if wanted and begin >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(206 if wanted else 200, body[begin:], headers, cut)

    def _send(self, code: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *dummy) -> None:
        pass


@pytest.fixture
def site():
    found = Site()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OneHandler", (Handler,), {"site": found}))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    found.files = {name_of(number): parquet(number) for number in (0, 1, 2, 77)}
    found.url = f"http://127.0.0.1:{server.server_port}/resolve/main"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(site, tmp_path):
    """Fetches the named shards with short pauses; returns the bytes that moved."""

    def run(*names: str, expected: dict | None = None, retries: int = 4) -> int:
        collection = Collection("master", site.url, 3, 77)
        return fetch_all(collection, list(names), Digests(str(tmp_path)), expected or {}, 2, retries, pause=0.01)

    return run


@pytest.mark.parametrize(
    ("shards", "numbers"), [(3, [0, 1, 77]), (2, [0, 77]), (200, [*range(77), 77]), (0, [*range(77), 77])]
)
def test_first_shards_train_and_the_last_of_the_collection_validates(shards, numbers):
    assert Collection("master", "http://x", shards, 77).names() == [name_of(number) for number in numbers]


def test_shards_arrive_whole(site, fetch, tmp_path):
    moved = fetch(name_of(0), name_of(1), name_of(77))

    assert moved == sum(len(site.files[name_of(number)]) for number in (0, 1, 77))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.parquet")} == {
        name_of(number): parquet(number) for number in (0, 1, 77)
    }
    assert not list(tmp_path.glob(".*.part*"))


def test_cut_download_goes_on_where_it_ended(site, fetch, tmp_path):
    site.faults[name_of(0)] = ["cut"]

    assert fetch(name_of(0)) == len(parquet(0))
    half = len(parquet(0)) // 2
    assert site.ranges == [(name_of(0), ""), (name_of(0), f"bytes={half}-")]
    assert (tmp_path / name_of(0)).read_bytes() == parquet(0)


def test_next_try_goes_on_after_a_failed_one(site, fetch, tmp_path):
    site.faults[name_of(0)] = ["cut", 500, 500, 500]
    with pytest.raises(
        ShardsError, match=r"^master: http.*shard_00000.parquet could not be downloaded in 4 attempts.*500"
    ):
        fetch(name_of(0))

    fetch(name_of(0))
    assert site.ranges[-1] == (name_of(0), f"bytes={len(parquet(0)) // 2}-")


def test_download_goes_on_through_a_redirection(site, fetch, tmp_path):
    """As big files are served: from another address than the one that was asked."""
    (tmp_path / f".{name_of(0)}.part").write_bytes(parquet(0)[:10_000])
    collection = Collection("master", site.url.replace("/resolve/", "/elsewhere/"), 2, 77)

    moved = fetch_all(collection, [name_of(0)], Digests(str(tmp_path)), {}, 1, 2, pause=0.01)

    assert moved == len(parquet(0)) - 10_000
    assert site.ranges == [(name_of(0), "bytes=10000-")]
    assert (tmp_path / name_of(0)).read_bytes() == parquet(0)


def test_passing_trouble_is_waited_out(site, fetch, tmp_path):
    site.faults[name_of(0)] = [503, 429, "page"]

    fetch(name_of(0))
    assert (tmp_path / name_of(0)).read_bytes() == parquet(0)


def test_wrong_address_is_said_at_once(site, fetch):
    with pytest.raises(ShardsError, match=r"^master: http.*/shard_00005.parquet: the server answered 404"):
        fetch(name_of(5))
    assert len(site.ranges) == 1


def test_error_page_is_no_shard(site, fetch, tmp_path):
    site.faults[name_of(0)] = ["page"] * 4

    with pytest.raises(ShardsError, match="not a parquet file: it starts with b'<htm'"):
        fetch(name_of(0))
    assert not list(tmp_path.glob("*.parquet"))


def test_server_without_ranges_is_asked_from_the_start(site, fetch, tmp_path):
    site.knows_ranges = False
    site.faults[name_of(0)] = ["cut"]

    fetch(name_of(0))
    assert (tmp_path / name_of(0)).read_bytes() == parquet(0)


def test_file_that_changed_on_the_server_is_fetched_from_the_start(site, fetch, tmp_path):
    site.headers[name_of(0)] = {"ETag": '"one"'}
    site.faults[name_of(0)] = ["cut", 500]
    with pytest.raises(ShardsError):
        fetch(name_of(0), retries=2)
    site.files[name_of(0)] = parquet(5)
    site.headers[name_of(0)] = {"ETag": '"two"'}

    fetch(name_of(0))
    assert (tmp_path / name_of(0)).read_bytes() == parquet(5)


def test_whole_part_is_not_fetched_again(site, fetch, tmp_path):
    (tmp_path / f".{name_of(0)}.part").write_bytes(parquet(0))

    assert fetch(name_of(0)) == 0
    assert (tmp_path / name_of(0)).read_bytes() == parquet(0)


def test_digest_of_the_manifest_is_held_against_the_bytes(site, fetch):
    with pytest.raises(ShardsError, match=r"its sha256 is .*, expected 0000000000000000"):
        fetch(name_of(0), expected={name_of(0): "0" * 64}, retries=2)


def test_digest_that_the_server_tells_is_held_against_the_bytes(site, fetch, tmp_path):
    site.headers[name_of(0)] = {"X-Linked-Etag": f'"{hashlib.sha256(parquet(0)).hexdigest()}"'}
    fetch(name_of(0))
    assert (tmp_path / name_of(0)).exists()

    site.headers[name_of(1)] = {"X-Linked-Etag": '"' + "0" * 64 + '"'}
    with pytest.raises(ShardsError, match="expected 0000000000000000"):
        fetch(name_of(1), retries=1)


def test_full_disk_is_said_with_need_and_rest(fetch, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_url, "free_bytes", lambda folder: 500)
    with pytest.raises(ShardsError, match=rf"^master: .*it needs 40.0 kB more in {tmp_path}, but 500 B are free there"):
        fetch(name_of(0))


def test_dead_server_is_named(tmp_path):
    collection = Collection("master", "http://127.0.0.1:1/x", 2, 77)
    with pytest.raises(ShardsError, match=r"^master: http://127.0.0.1:1/x/shard_00000.parquet .*Connection refused"):
        fetch_all(collection, [name_of(0)], Digests(str(tmp_path)), {}, 1, 2, pause=0.01)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (parquet(0), ""),
        (parquet(0)[:-1], "it ends with"),
        (b"PAR1PAR1", "it ends with"),
        (b"PAR1" + b"x" * 8 + (500).to_bytes(4, "little") + b"PAR1", "footer"),
        (b"", "starts with b''"),
    ],
)
def test_whole_parquet_file_is_told_from_others(tmp_path, content, problem):
    (tmp_path / "file").write_bytes(content)
    found = shard_url.parquet_problem(str(tmp_path / "file"))
    assert problem in found if problem else found == ""
