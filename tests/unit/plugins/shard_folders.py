# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders of shards for the tests of shard_sync, and hosts that are folders of this machine."""

from __future__ import annotations

import threading
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._shards import share as shard_share
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    Digests,
    entries,
    files_below,
    manifest_of,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.pull import Puller, ShardPeer

SECRET = "of-this-transfer"


def parquet(number: int, size: int = 40_000) -> bytes:
    """Bytes that pass for a parquet file; each number has its own."""
    body = bytes((number * 31 + n * 7 + n // 251) % 256 for n in range(size))
    return b"PAR1" + body + (100).to_bytes(4, "little") + b"PAR1"


def fill(folder: Path, shards: int = 3, size: int = 40_000) -> Path:
    """A data set of so many shards."""
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        (folder / f"shard_{number:05d}.parquet").write_bytes(parquet(number, size))
    (folder / "tokenizer/tokenizer.pkl").write_bytes(b"a tokenizer")
    (folder / "tokenizer/token_bytes.pt").write_bytes(b"its bytes")
    return folder


def describe(folder: Path) -> dict:
    """The folder's manifest, with its digests remembered, so that a server offers its files."""
    digests = Digests(str(folder))
    manifest = manifest_of(folder.name, "data", [digests.of(name) for name in files_below(str(folder), "data")])  # type: ignore[misc]
    digests.save()
    return manifest


def server_settings(folder: Path, **changes) -> shard_share.ServerSettings:
    """Those of a server on this machine and for this machine."""
    given = shard_share.ServerSettings(
        folder.name, str(folder), "127.0.0.1", 0, 0, ["127.0.0.1"], SECRET, lifetime=120, idle=120
    )
    return given._replace(**changes)


class Host:
    """A folder that is served as another host's would be."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.manifest = describe(folder)
        state = shard_share.start(server_settings(folder))
        self.pid = state["pid"]
        self.peer = ShardPeer(folder.name, "127.0.0.1", state["port"])

    def stop(self) -> dict:
        """Returns the bytes that were sent, by file."""
        state = shard_share.stop(shard_share.place_of(str(self.folder), SECRET))
        return dict(state["served"]) if state else {}

    def pull(self, manifest: dict, peers: list[ShardPeer], patience: float = 10.0) -> dict:
        """Fetch the shards that this host lacks from the peers."""
        digests = Digests(str(self.folder))
        wanted = [one for one in entries(manifest) if digests.of(one.path) != one]
        return Puller(self.folder.name, digests, peers, SECRET, "127.0.0.1").pull(wanted, patience)


def all_at_once(jobs: list) -> list:
    """Runs the jobs at the same time; returns what they raised."""
    raised: list = []

    def run(job) -> None:
        try:
            job()
        except BaseException as why:
            raised.append(why)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
