# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads numbered parquet shards of a public collection: resumable, retried, and checked before they get a name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import os
import re
import time
import urllib.error
from typing import Any, Callable, NamedTuple, TypedDict

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    CHUNK,
    Digests,
    ShardsError,
    free_bytes,
)

MAGIC = b"PAR1"
READ_SECONDS = 30.0
USER_AGENT = "nanochat.ddp"


class Collection(NamedTuple):
    """Where numbered shards are, and which of them are wanted."""

    host: str  # which fetches
    url: str
    shards: int  # wanted, the validation shard among them
    last: int  # number of the collection's last shard, which is validation

    def names(self) -> list[str]:
        """The first ones train, the last one of the collection validates."""
        train = range(min(self.shards - 1, self.last)) if self.shards > 0 else range(self.last)
        return [name_of(number) for number in [*train, self.last]]


class Promised(TypedDict):
    """Size and digest of a file by the word of its server; the digest may be empty."""

    size: int
    sha256: str


class PassingError(Exception):
    """A failure that another try may repair."""


class FinalError(Exception):
    """A failure that stays."""


def name_of(number: int) -> str:
    """The collection's file names."""
    return f"shard_{number:05d}.parquet"


def fetch_all(
    collection: Collection,
    names: list[str],
    digests: Digests,
    expected: dict[str, str],
    parallel: int = 4,
    retries: int = 6,
    pause: float = 1.0,
) -> int:
    """Fetches the named shards into the folder; returns the bytes that crossed the network."""
    moved: list[int] = []

    def one(name: str) -> None:
        moved.append(_fetch(collection, name, digests, expected.get(name), retries, pause))

    with concurrent.futures.ThreadPoolExecutor(max(1, parallel)) as pool:
        waiting = [pool.submit(one, name) for name in names]
        try:
            for done in concurrent.futures.as_completed(waiting):
                done.result()
        except BaseException:
            for other in waiting:
                other.cancel()
            raise
    return sum(moved)


def _fetch(
    collection: Collection, name: str, digests: Digests, expected: str | None, retries: int, pause: float
) -> int:
    url = f"{collection.url.rstrip('/')}/{name}"
    target = os.path.join(digests.folder, name)
    moved = [0]
    seen = ""
    for attempt in range(retries):
        try:
            sha256 = Download(url, target, lambda count: moved.__setitem__(0, moved[0] + count)).run(expected)
            os.replace(Download.part(target), target)
            _forget_part(target)
            digests.learn(name, sha256)
            return moved[0]
        except PassingError as why:
            seen = str(why)
        except FinalError as why:
            raise ShardsError(f"{collection.host}: {url}: {why}") from why
        except OSError as why:
            raise ShardsError(f"{collection.host}: {target} cannot be written: {why.strerror or why}") from why
        if attempt + 1 < retries:
            time.sleep(min(pause * 2**attempt, 60))
    raise ShardsError(
        f"{collection.host}: {url} could not be downloaded in {retries} attempts; the last one failed with: {seen}. "
        "Partial files are kept, and the next attempt resumes from them"
    )


class Download:
    """One try at one file, which goes on where the last one ended."""

    def __init__(self, url: str, target: str, count: Callable[[int], None]) -> None:
        self.url = url
        self.path = self.part(target)
        self.count = count

    @staticmethod
    def part(target: str) -> str:
        return os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.part")

    def run(self, expected: str | None) -> str:
        """Returns the digest of the complete and plausible file."""
        begin = self._size()
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={begin}-"} if begin else {})}
        try:
            with open_url(self.url, headers=headers, timeout=READ_SECONDS, http_agent=USER_AGENT) as response:
                promised = self._receive(response, begin)
        except urllib.error.HTTPError as why:
            self._judge(why, begin)
            promised = {"size": begin, "sha256": ""}
        except (OSError, http.client.HTTPException, UrlError) as why:
            if isinstance(why, OSError) and str(why.filename or "").startswith(self.path):
                raise
            raise PassingError(_said(why)) from why
        return self._check(promised, expected or promised["sha256"])

    def _judge(self, why: urllib.error.HTTPError, begin: int) -> None:
        """Tells apart what passes and what stays; 416 means that the part was complete already, or that it is junk."""
        if why.code == 416 and begin:
            total = (why.headers.get("Content-Range") or "").rpartition("/")[2]
            if total == str(begin):
                return
            os.unlink(self.path)
            raise PassingError("the server's file is shorter than what an earlier attempt downloaded")
        if why.code in (401, 403, 404, 410):
            raise FinalError(f"the server answered {why.code} {why.reason}; is the base URL right?")
        raise PassingError(f"the server answered {why.code} {why.reason}")

    def _receive(self, response: http.client.HTTPResponse, begin: int) -> Promised:
        begin = self._begin(response, begin)
        size = begin + int(response.headers.get("Content-Length") or 0)
        free = free_bytes(os.path.dirname(self.path))
        if size - begin > free:
            raise FinalError(
                f"it needs {bytes_text(size - begin)} more in {os.path.dirname(self.path)}, but {bytes_text(free)} are free there; make "
                "room, take fewer shards (ddp_data_shards), or give this host another base folder (ddp_base_dir)"
            )
        with open(self.path, "ab" if begin else "wb") as file:
            while True:
                chunk = response.read(CHUNK)
                if not chunk:
                    break
                _write(file, chunk, self.path)
                self.count(len(chunk))
        etag = (response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "").strip('W/"')
        return {"size": size, "sha256": etag if re.fullmatch("[0-9a-f]{64}", etag) else ""}

    def _begin(self, response: http.client.HTTPResponse, begin: int) -> int:
        """Where this answer starts: from nothing if the file has changed or the server knows no ranges."""
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        known = _read(self.path + ".etag")
        if begin and response.status == 206 and known and tag and known != tag:
            os.unlink(self.path)
            raise PassingError("the file changed on the server since the last attempt; starting over")
        if response.status != 206:
            begin = 0
        with open(self.path + ".etag", "w", encoding="utf-8") as file:
            file.write(tag)
        return begin

    def _check(self, promised: Promised, expected: str) -> str:
        size = self._size()
        if promised["size"] and size < promised["size"]:
            raise PassingError(f"cut after {bytes_text(size)} of {bytes_text(promised['size'])}")
        problem = parquet_problem(self.path)
        sha256 = "" if problem else _hash(self.path)
        if not problem and expected and sha256 != expected:
            problem = f"its sha256 is {sha256[:16]}..., expected {expected[:16]}..."
        if problem:
            os.unlink(self.path)
            raise PassingError(problem)
        return sha256

    def _size(self) -> int:
        try:
            return os.path.getsize(self.path)
        except OSError:
            return 0


def parquet_problem(path: str) -> str:
    """Why a file cannot be a whole parquet file; empty if it can."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - 8))
        tail = file.read(8)
    if head != MAGIC:
        return f"not a parquet file: it starts with {head!r} (an error page instead of the file?)"
    if size < 12 or tail[4:] != MAGIC:
        return f"not a complete parquet file: it ends with {tail[4:]!r} after {bytes_text(size)}"
    if int.from_bytes(tail[:4], "little") > size - 12:
        return "not a complete parquet file: its footer length exceeds the file size"
    return ""


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _write(file: Any, chunk: bytes, path: str) -> None:
    try:
        file.write(chunk)
    except OSError as why:
        raise OSError(why.errno, why.strerror, path) from why


def _said(why: BaseException) -> str:
    reason = getattr(why, "reason", None)
    return str(reason if reason is not None else why) or type(why).__name__


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _forget_part(target: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(Download.part(target) + ".etag")
