# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state `fetched` of a folder: numbered parquet shards of a public collection are downloaded, resumable, retried, and verified
before they get a name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import re
import time
import urllib.error
from typing import Iterator, NoReturn

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url

from .._contract import validate
from .._contract.validate import NO_CREDENTIALS, has_credentials
from .._kit.files import hash_file, read_text
from .._kit.words import bytes_text, plural
from .folder import CHUNK, Digests, ShardsError, load_manifest, make_folder, writing
from .states import ShardsOutcome, ShardsRequest

MAGIC = b"PAR1"
READ_SECONDS = 30.0
TRIES = 6
AT_ONCE = 3  # files
PAUSE = 1.0  # seconds before the second try, doubled before each further one
USER_AGENT = "nanochat.ddp"
TAG = ".etag"  # the end of the name of the file beside a part, with the tag and the digest that the server told
NETWORK = (OSError, http.client.HTTPException, UrlError)


class PassingError(Exception):
    """A failure that a retry may fix."""


def fetch(request: ShardsRequest) -> ShardsOutcome:
    """Download missing or broken files of a collection."""
    base, names = str(request.options["url"]), [validate.file_path(name) for name in request.options["names"]]
    if has_credentials(base):
        raise ShardsError(f"url is {NO_CREDENTIALS}")
    kept, digests = load_manifest(request.path), Digests(request.path)
    expected = {one.path: one.sha256 for one in kept.files} if kept else {}
    problems = {name: _problem(request.path, name, digests, expected.get(name)) for name in names}
    outcome = ShardsOutcome.of_names(names, [name for name in names if problems[name]], [])
    outcome.repaired = {name: what for name, what in problems.items() if what not in ("", "missing")}
    if outcome.moved:
        outcome.msg = f"{plural(len(outcome.moved), 'shard')} to fetch from {base}"
    if outcome.moved and not request.check:
        make_folder(request.path)
        with writing(request.path):
            outcome.bytes = fetch_all(base, outcome.moved, digests, expected)
        outcome.sources = {base: outcome.bytes}
    if not request.check:
        digests.save()
    return outcome


def _problem(folder: str, name: str, digests: Digests, sha256: str | None) -> str:
    full = os.path.join(folder, name)
    if not os.path.isfile(full):
        return "missing"
    if parquet_problem(full):
        return "truncated"
    return "corrupted" if digests.of(name) != (sha256 or digests.of(name)) else ""


def fetch_all(base: str, names: list[str], digests: Digests, expected: dict[str, str]) -> int:
    """Download the named files into the folder; returns the bytes transferred."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(_fetch, base, name, digests, expected.get(name)) for name in names]
        try:
            return sum(done.result() for done in concurrent.futures.as_completed(waiting))
        finally:
            pool.shutdown(cancel_futures=True)


def _fetch(base: str, name: str, digests: Digests, expected: str | None) -> int:
    """Download a file to a hidden part file, in which each attempt goes on where the last one ended, and prove it."""
    url, target = f"{base.rstrip('/')}/{name}", os.path.join(digests.folder, name)
    part = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.part")
    moved, seen = 0, ""
    for attempt in range(TRIES):
        time.sleep(min(PAUSE * 2 ** (attempt - 1), 60) if attempt else 0)
        try:
            for count in _receive(url, part):
                moved += count
            sha256 = _proven(part, expected)
            os.replace(part, target)
            with contextlib.suppress(OSError):
                os.unlink(part + TAG)
            digests.learn(name, sha256)
            return moved
        except PassingError as why:
            seen = str(why)
        except ShardsError as why:
            raise ShardsError(f"{url}: {why}") from why
        except OSError as why:
            raise ShardsError(f"{target} cannot be written: {why.strerror or why}") from why
    raise ShardsError(
        f"{url} could not be downloaded in {TRIES} attempts; the last one failed with: {seen}. "
        "Partial files are kept, and the next attempt resumes from them"
    )


def _receive(url: str, part: str) -> Iterator[int]:
    """Write what the part lacks; yields the bytes of each chunk."""
    begin = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={begin}-"} if begin else {})}
    try:
        response = open_url(url, headers=headers, timeout=READ_SECONDS, http_agent=USER_AGENT)
    except urllib.error.HTTPError as why:
        if why.code == 416 and begin and (why.headers.get("Content-Range") or "").endswith(f"/{begin}"):
            return  # it is complete already
        if why.code == 416:
            _start_over(part, "the server's file is shorter than what an earlier attempt downloaded")
        told = f"the server answered {why.code} {why.reason}"
        if why.code in (401, 403, 404, 410):
            raise ShardsError(f"{told}; is the base URL right?") from why
        raise PassingError(told) from why
    except NETWORK as why:
        raise PassingError(_error_text(why)) from why
    with response:
        begin = _append_to(part, begin, response)
        size = begin + int(response.headers.get("Content-Length") or 0)
        make_folder(os.path.dirname(part), size - begin)
        with open(part, "ab" if begin else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
                yield len(chunk)
    if os.path.getsize(part) < size:
        raise PassingError(f"cut after {bytes_text(os.path.getsize(part))} of {bytes_text(size)}")


def _append_to(part: str, begin: int, response: http.client.HTTPResponse) -> int:
    """Where the answer goes on; 0 if the server sends the file from its start.

    Remembers which file it is, and its digest, if the server tells.
    """
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    digest = (response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "").strip('W/"')
    known = read_text(part + TAG).partition("\n")[0]
    if response.status == 206 and known and tag and known != tag:
        _start_over(part, "the file changed on the server since the last attempt; starting over")
    with open(part + TAG, "w", encoding="utf-8") as file:
        file.write(f"{tag}\n{digest if re.fullmatch('[0-9a-f]{64}', digest) else ''}")
    return begin if response.status == 206 else 0


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except NETWORK as why:
        raise PassingError(_error_text(why)) from why


def _start_over(part: str, problem: str) -> NoReturn:
    os.unlink(part)
    raise PassingError(problem)


def _proven(part: str, expected: str | None) -> str:
    """The digest of a whole and right file."""
    problem, wanted = parquet_problem(part), expected or read_text(part + TAG).partition("\n")[2]
    sha256 = "" if problem else hash_file(part)
    if not problem and wanted and sha256 != wanted:
        problem = f"its sha256 is {sha256[:16]}..., expected {wanted[:16]}..."
    return _start_over(part, problem) if problem else sha256


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


def _error_text(why: BaseException) -> str:
    reason = getattr(why, "reason", None)
    return str(reason if reason is not None else why) or type(why).__name__
