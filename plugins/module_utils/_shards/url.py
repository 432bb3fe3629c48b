# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads numbered parquet shards of a public collection: resumable, retried, and verified before they get a name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import re
import time
import urllib.error
from typing import Any

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url

from .._kit.files import free_bytes, read_text
from .._kit.words import bytes_text
from .folder import CHUNK, Digests, ShardsError, hash_file

MAGIC = b"PAR1"
READ_SECONDS = 30.0
TRIES = 6
AT_ONCE = 3  # files
PAUSE = 1.0  # seconds before the second try, doubled before each further one
USER_AGENT = "nanochat.ddp"


class PassingError(Exception):
    """A failure that a retry may fix."""


class FinalError(Exception):
    """A permanent failure."""


def fetch_all(host: str, base: str, names: list[str], digests: Digests, expected: dict[str, str]) -> int:
    """Download the named files into the folder; returns the bytes transferred."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(_fetch, host, base, name, digests, expected.get(name)) for name in names]
        try:
            return sum(done.result() for done in concurrent.futures.as_completed(waiting))
        except BaseException:
            for other in waiting:
                other.cancel()
            raise


def _fetch(host: str, base: str, name: str, digests: Digests, expected: str | None) -> int:
    url, target = f"{base.rstrip('/')}/{name}", os.path.join(digests.folder, name)
    download = Download(url, target)
    seen = ""
    for attempt in range(TRIES):
        time.sleep(min(PAUSE * 2 ** (attempt - 1), 60) if attempt else 0)
        try:
            sha256 = download.attempt(expected)
            os.replace(download.path, target)
            with contextlib.suppress(OSError):
                os.unlink(download.etag_path)
            digests.learn(name, sha256)
            return download.moved
        except PassingError as why:
            seen = str(why)
        except FinalError as why:
            raise ShardsError(f"{host}: {url}: {why}") from why
        except OSError as why:
            raise ShardsError(f"{host}: {target} cannot be written: {why.strerror or why}") from why
    raise ShardsError(
        f"{host}: {url} could not be downloaded in {TRIES} attempts; the last one failed with: {seen}. "
        "Partial files are kept, and the next attempt resumes from them"
    )


class Download:
    """A file on its way, in a hidden part file; each attempt resumes the last one."""

    def __init__(self, url: str, target: str) -> None:
        self.url = url
        self.path = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.part")
        self.etag_path = self.path + ".etag"
        self.moved = 0

    def attempt(self, expected: str | None) -> str:
        """Returns the digest of the complete and plausible file."""
        begin = self._size()
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={begin}-"} if begin else {})}
        try:
            with open_url(self.url, headers=headers, timeout=READ_SECONDS, http_agent=USER_AGENT) as response:
                size, sha256 = self._receive(response, begin)
        except urllib.error.HTTPError as why:
            self._require_complete(why, begin)
            size, sha256 = begin, ""
        except (OSError, http.client.HTTPException, UrlError) as why:
            if isinstance(why, OSError) and str(why.filename or "").startswith(self.path):
                raise
            raise PassingError(_error_text(why)) from why
        return self._check(size, expected or sha256)

    def _require_complete(self, why: urllib.error.HTTPError, begin: int) -> None:
        """Raise a temporary or permanent failure, unless the server refused because the part is complete (416)."""
        if why.code == 416 and begin:
            total = (why.headers.get("Content-Range") or "").rpartition("/")[2]
            if total == str(begin):
                return
            os.unlink(self.path)
            raise PassingError("the server's file is shorter than what an earlier attempt downloaded")
        if why.code in (401, 403, 404, 410):
            raise FinalError(f"the server answered {why.code} {why.reason}; is the base URL right?")
        raise PassingError(f"the server answered {why.code} {why.reason}")

    def _receive(self, response: http.client.HTTPResponse, begin: int) -> tuple[int, str]:
        """Write the answer to the part; returns size and digest according to the server, which may tell no digest."""
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
                self.moved += len(chunk)
        etag = (response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "").strip('W/"')
        return size, etag if re.fullmatch("[0-9a-f]{64}", etag) else ""

    def _begin(self, response: http.client.HTTPResponse, begin: int) -> int:
        """Offset of this answer: 0 if the file changed or the server does not support ranges."""
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        known = read_text(self.etag_path)
        if begin and response.status == 206 and known and tag and known != tag:
            os.unlink(self.path)
            raise PassingError("the file changed on the server since the last attempt; starting over")
        if response.status != 206:
            begin = 0
        with open(self.etag_path, "w", encoding="utf-8") as file:
            file.write(tag)
        return begin

    def _check(self, promised: int, expected: str) -> str:
        size = self._size()
        if size < promised:
            raise PassingError(f"cut after {bytes_text(size)} of {bytes_text(promised)}")
        problem = parquet_problem(self.path)
        sha256 = "" if problem else hash_file(self.path)
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
    """Why a file cannot be a complete parquet file; empty if it can."""
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


def _write(file: Any, chunk: bytes, path: str) -> None:
    try:
        file.write(chunk)
    except OSError as why:
        raise OSError(why.errno, why.strerror, path) from why


def _error_text(why: BaseException) -> str:
    reason = getattr(why, "reason", None)
    return str(reason if reason is not None else why) or type(why).__name__
