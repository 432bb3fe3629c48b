# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role data on three hosts that are folders of this machine, over real sockets."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import fill, parquet


@pytest.fixture
def home(tmp_path):
    """A data set of 201 shards on the master, in nanochat's layout."""
    source = fill(tmp_path / "home/base_data_climbmix", shards=0)
    for number in range(201):
        (source / f"shard_{number:05d}.parquet").write_bytes(parquet(number, 2_000))
    (source / "tokenizer").rename(tmp_path / "home/tokenizer")
    return source


@pytest.fixture
def play(tmp_path, home):
    data = {"id": "host-1", "source": "host", "paths": [str(home)], "url": None, "shards": 8, "vocab_size": 300}
    made = Play(tmp_path, "abc", {"run": "d4", "data": data, "timeout_seconds": 10})
    # Folders of one machine are not those of three.
    made.variables = {"data_seeds": []}
    return made


def read(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_field_07_master_with_201_shards_and_worker_with_4(play, home):
    worker = Path(play.hosts["b"]["run_dir"], "data")
    worker.mkdir(parents=True)
    for number in range(4):
        (worker / f"shard_{number:05d}.parquet").write_bytes(parquet(number + 500, 2_000))

    checked = play.run("data", "--check")
    assert not Path(play.hosts["a"]["data_dir"]).exists()
    first = play.run("data")
    second = play.run("data")

    wanted = {
        name: (home / name).read_bytes()
        for name in [*(f"shard_0000{n}.parquet" for n in range(7)), "shard_00200.parquet"]
    }
    assert messages(checked) == messages(first) == messages(second) == []
    assert counts(checked, "changed")["a"] == 1
    for node in play.hosts.values():
        assert read(node["run_dir"] + "/data") == wanted
        assert set(read(node["run_dir"] + "/tokenizer")) == {"tokenizer.pkl", "token_bytes.pt"}
    assert set(results(first, "Fetch what is missing or broken")["b"]["from"]) <= {"a", "c"}
    assert counts(second, "changed") == {"a": 0, "b": 0, "c": 0}
    assert not list(play.folder.glob("*/data/*/.share"))

    # Broken in three ways on three hosts, the first among them: each has what another lacks. A copy replaces the
    # link into the home folder, which must not change.
    broken = Path(play.hosts["a"]["data_dir"], "shard_00002.parquet")
    broken.unlink()
    broken.write_bytes(b"X" + wanted["shard_00002.parquet"][1:])
    with Path(play.hosts["c"]["data_dir"], "shard_00003.parquet").open("r+b") as file:
        file.truncate(1000)
    Path(play.hosts["b"]["data_dir"], "shard_00200.parquet").unlink()

    repaired = play.run("data")

    fetched = results(repaired, "Fetch what is missing or broken")
    assert {name: fetched[name]["repaired"] for name in "abc"} == {
        "a": {"shard_00002.parquet": "corrupted"},
        "b": {},
        "c": {"shard_00003.parquet": "truncated"},
    }
    assert all(read(node["run_dir"] + "/data") == wanted for node in play.hosts.values())


@pytest.mark.long
def test_shards_of_the_controller(play, home):
    paths = [str(home), str(home.parent / "tokenizer")]
    play.plan["data"].update(source="controller", paths=paths, host="b", shards=2)

    checked = play.run("data", "--check")
    assert not any(Path(node["base_dir"]).exists() for node in play.hosts.values())
    first = play.run("data")

    assert messages(checked) == messages(first) == []
    assert counts(checked, "changed")["b"] >= 1
    wanted = {name: (home / name).read_bytes() for name in ("shard_00000.parquet", "shard_00200.parquet")}
    assert all(read(node["run_dir"] + "/data") == wanted for node in play.hosts.values())


def test_shards_of_a_url(play, tmp_path, home):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(home))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    names = ["shard_00000.parquet", "shard_00001.parquet", "shard_00200.parquet"]
    url = f"http://127.0.0.1:{server.server_port}"
    play.plan["data"].update(source="url", paths=[], url=url, shards=3, names=names)
    # Its tokenizer is trained already.
    fill(Path(play.hosts["a"]["data_dir"]), shards=0)
    try:
        account = play.run("data")
    finally:
        server.shutdown()
        server.server_close()

    assert messages(account) == []
    assert all(
        read(node["run_dir"] + "/data") == {n: (home / n).read_bytes() for n in names} for node in play.hosts.values()
    )
