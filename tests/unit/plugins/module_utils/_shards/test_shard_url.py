# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads from a server on this machine which cuts, lies, refuses and recovers."""

from __future__ import annotations

import hashlib
import http.server
import threading

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import files
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import url as shard_url
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests, ShardsError
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import parquet

NAME, OTHER = "shard_00000.parquet", "shard_00077.parquet"


class Site:
    """The server's files, its behaviour for the next requests of a path, and the requests it got."""

    def __init__(self) -> None:
        self.files = {NAME: parquet(0), OTHER: parquet(77)}
        self.faults: dict[str, list] = {}
        self.ranges: list[str] = []
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
        self.site.ranges.append(self.headers.get("Range", ""))
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
    found.url = f"http://127.0.0.1:{server.server_port}/resolve/main"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(site, tmp_path, monkeypatch):
    """Fetches the named shards with short pauses; returns the bytes that moved."""
    monkeypatch.setattr(shard_url, "PAUSE", 0.01)

    def run(*names: str, expected: dict | None = None, tries: int = 4, base: str = "") -> int:
        monkeypatch.setattr(shard_url, "TRIES", tries)
        digests = Digests(str(tmp_path))
        return shard_url.fetch_all(base or site.url, list(names or [NAME]), digests, expected or {})

    return run


HALF = f"bytes={len(parquet(0)) // 2}-"


@pytest.mark.parametrize(
    ("faults", "knows_ranges", "asked"),
    [
        ([], True, [""]),
        (["cut"], True, ["", HALF]),
        (["cut"], False, ["", HALF]),
        ([503, 429, "page"], True, ["", "", "", ""]),
    ],
    ids=["no fault", "cut", "cut, and no ranges", "passing trouble"],
)
def test_shards_arrive_whole(site, fetch, tmp_path, faults, knows_ranges, asked):
    site.faults[NAME], site.knows_ranges = faults, knows_ranges

    assert fetch() >= len(parquet(0))
    assert site.ranges == asked
    assert fetch(OTHER) == len(parquet(77))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == site.files


@pytest.mark.parametrize("there", [10_000, len(parquet(0))])
def test_download_goes_on_through_a_redirection_or_is_whole_already(site, fetch, tmp_path, there):
    """As big files are served: from another address than the one that was asked."""
    (tmp_path / f".{NAME}.part").write_bytes(parquet(0)[:there])

    assert fetch(base=site.url.replace("/resolve/", "/elsewhere/")) == len(parquet(0)) - there
    assert site.ranges == [f"bytes={there}-"]
    assert (tmp_path / NAME).read_bytes() == parquet(0)


def test_file_that_changed_on_the_server_is_fetched_from_the_start(site, fetch, tmp_path):
    site.headers[NAME] = {"ETag": '"one"'}
    site.faults[NAME] = ["cut", 500]
    with pytest.raises(ShardsError, match=r"^http.*shard_00000.parquet could not be downloaded in 2 attempts.*500"):
        fetch(tries=2)
    site.files[NAME] = parquet(5)
    site.headers[NAME] = {"ETag": '"two"', "X-Linked-Etag": f'"{hashlib.sha256(parquet(5)).hexdigest()}"'}

    fetch()
    assert site.ranges[2:] == [HALF, ""] and (tmp_path / NAME).read_bytes() == parquet(5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "shard_00005.parquet"}, r"/shard_00005.parquet: the server answered 404"),
        ({"fault": "page"}, "not a parquet file: it starts with b'<htm'"),
        ({"expected": "0" * 64}, "its sha256 is .*, expected 0000000000000000"),
        ({"told": "0" * 64}, "expected 0000000000000000"),
        ({"base": "http://127.0.0.1:1/x"}, r"http://127.0.0.1:1/x/shard_00000.parquet .*Connection refused"),
    ],
)
def test_what_is_no_right_shard_is_said_and_not_kept(site, fetch, tmp_path, given, said):
    site.faults[NAME] = [given["fault"]] * 2 if "fault" in given else []
    site.headers[NAME] = {"X-Linked-Etag": f'"{given["told"]}"'} if "told" in given else {}
    expected = {NAME: given["expected"]} if "expected" in given else {}

    with pytest.raises(ShardsError, match=f"^(?s:.*){said}"):
        fetch(given.get("name", NAME), expected=expected, tries=2, base=given.get("base", ""))

    assert not list(tmp_path.glob("*.parquet"))
    assert len(site.ranges) == (0 if "base" in given else 1 if "name" in given else 2)


def test_full_disk_is_said_with_need_and_rest(fetch, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 500)
    with pytest.raises(
        ShardsError, match=rf"http.*: {tmp_path} needs 40.0 kB more, but its file system has 500 B free"
    ):
        fetch()


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
