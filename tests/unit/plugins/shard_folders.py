# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders of shards for the tests of shard_sync, and hosts that are folders of this machine."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server as shard_server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.chain import Chain, ShardPeer, Source
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    Digests,
    Manifest,
    data_files,
    link_exactly,
    run_path,
    save_manifest,
)

SECRET = "of-this-transfer"


def parquet(number: int, size: int = 40_000) -> bytes:
    """Bytes that pass for a parquet file; each number has its own."""
    body = random.Random(number).randbytes(size)
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
    manifest = Manifest(folder.name, [digests.described(name) for name in data_files(str(folder))])
    digests.save()
    return manifest.document()


def make_ready(data_dir: str, run_dir: str) -> None:
    """A data set in the store, and its links in a run."""
    manifest = Manifest.read(describe(fill(Path(data_dir))))
    save_manifest(data_dir, manifest)
    link_exactly(run_dir, {run_path(one.path): f"{data_dir}/{one.path}" for one in manifest.files}, [])


def server_settings(folder: Path, manifest: dict | None = None, **changes) -> shard_server.ServerSettings:
    """Those of a server on this machine and for this machine."""
    offered = Manifest.read(manifest or {})
    given = shard_server.ServerSettings(str(folder), offered, "127.0.0.1", 0, 0, ["127.0.0.1"], SECRET)
    return given._replace(**changes)


class Host:
    """A folder that is served as another host's would be."""

    def __init__(self, folder: Path, manifest: dict | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.manifest = manifest or describe(folder)
        self.place = shard_server.place_of(str(folder), SECRET)
        state = shard_server.start(server_settings(folder, self.manifest))
        self.peer = ShardPeer(folder.name, "127.0.0.1", state["port"])

    def stop(self) -> None:
        shard_server.stop(self.place)

    def pull(self, manifest: dict, peers: list[ShardPeer], patience: float = 10.0) -> dict:
        """Fetch the shards that this host lacks from the peers, the nearest first."""
        digests = Digests(str(self.folder))
        wanted = [one for one in Manifest.read(manifest).files if digests.known(one.path) != one.sha256]
        sources = [Source(peer, SECRET, "127.0.0.1") for peer in peers]
        return Chain(digests, sources, [], patience).pull(wanted)


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
