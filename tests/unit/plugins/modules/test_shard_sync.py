# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import errno
import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import files
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import folder as shards_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import states, url
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Manifest
from ansible_collections.nanochat.ddp.plugins.modules import shard_sync
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import SECRET, Host, describe, fill

ALL = [*(f"shard_0000{n}.parquet" for n in range(3)), "tokenizer/tokenizer.pkl", "tokenizer/token_bytes.pt"]


@pytest.fixture
def master(tmp_path):
    host = Host(fill(tmp_path / "master"))
    yield host
    host.stop()


@pytest.fixture
def sync(run_module, master, tmp_path):
    """The modules for folders of shards, between folders of this machine."""

    def run(_check_mode=False, **options):
        given = {
            "path": str(tmp_path / "store"),
            "host": "worker",
            "manifest": master.manifest,
            "peers": [master.peer._asdict()],
            "secret": SECRET,
        }
        return run_module(shard_sync, _check_mode=_check_mode, **{**given, **options})

    return run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_brings_all_files_and_says_from_where(sync, master, tmp_path):
    # A manifest may also be given as it was read from a file.
    checked = sync(_check_mode=True, manifest=json.dumps(master.manifest))
    assert not (tmp_path / "store").exists()
    result = sync()

    assert result["changed"] and not result.get("failed")
    assert all(checked[key] == result[key] for key in ("changed", "moved", "bytes", "digest", "diff"))
    assert result["moved"] == ALL
    manifest = Manifest.read(master.manifest)
    assert result["bytes"] == sum(one.bytes for one in manifest.files)
    assert result["from"] == {"master": result["bytes"]}
    assert result["digest"] == manifest.digest()
    assert result["diff"] == {"before": "", "after": manifest.listing()}
    assert json.loads((tmp_path / "store/manifest.json").read_text()) == result["manifest"] == master.manifest
    assert SECRET not in str(result)


def test_second_run_changes_nothing_reads_nothing_and_needs_no_peer(sync, monkeypatch):
    sync()
    monkeypatch.delattr(shards_utils, "hash_file")

    result = sync(peers=[])

    assert not result["changed"]
    assert (result["moved"], result["bytes"], result["from"]) == ([], 0, {})
    assert result["diff"]["before"] == result["diff"]["after"]


def test_files_of_the_same_host_are_linked_not_moved(sync, tmp_path):
    own = fill(tmp_path / "own")
    (own / ALL[2]).write_bytes(b"not any more what the manifest says")

    result = sync(seeds=[str(own)])

    assert (tmp_path / "store" / ALL[0]).samefile(own / ALL[0])
    assert result["from"] == {"master": 40_012, "worker": 80_044}


def test_field_07_missing_truncated_corrupted_and_oversized_files_are_mended(sync, tmp_path):
    sync()
    store = tmp_path / "store"
    (store / ALL[0]).unlink()
    (store / ALL[1]).write_bytes((store / ALL[1]).read_bytes()[:100])
    (store / ALL[2]).write_bytes(b"X" + (store / ALL[2]).read_bytes()[1:])
    (store / ALL[3]).write_bytes(b"a tokenizer and more")
    (store / "shard_00200.parquet").write_bytes(b"of an older data set")

    result = sync()

    assert result["repaired"] == {ALL[1]: "truncated", ALL[2]: "corrupted", ALL[3]: "oversized"}
    assert result["moved"] == ALL[:4]
    assert (store / "shard_00200.parquet").exists()
    assert not sync()["changed"]


def test_full_disk_is_said_before_anything_moves(sync, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)

    result = sync()

    assert result["failed"]
    assert f"worker: {tmp_path}/store needs " in result["msg"] and "1.0 kB free" in result["msg"]
    assert not list((tmp_path / "store").rglob("*.p*"))


def test_run_reads_exactly_the_shards_of_the_plan(sync, run_module, tmp_path):
    sync()
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "data/shard_00150.parquet").write_bytes(b"left by another plan")
    options = {"path": str(tmp_path / "store"), "dest": str(run)}

    checked = run_module(shard_sync, state="linked", _check_mode=True, **options)
    assert names(run / "data") == ["shard_00150.parquet"]
    done = run_module(shard_sync, state="linked", **options)
    again = run_module(shard_sync, state="linked", **options)

    assert names(run / "data") == ALL[:3]
    assert names(run / "tokenizer") == ["token_bytes.pt", "tokenizer.pkl"]
    assert [one["changed"] for one in (checked, done, again)] == [True, True, False]
    assert checked["diff"] == done["diff"]
    assert (run / "data" / ALL[0]).samefile(tmp_path / "store" / ALL[0])

    # A mended shard is another file.
    (tmp_path / "store" / ALL[1]).unlink()
    sync()
    assert run_module(shard_sync, state="linked", **options)["moved"] == ["data/" + ALL[1]]


def test_links_across_file_systems_are_symbolic(sync, run_module, tmp_path, monkeypatch):
    sync()

    def refuse(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    run_module(shard_sync, state="linked", path=str(tmp_path / "store"), dest=str(tmp_path / "run"))

    assert (tmp_path / "run/data" / ALL[0]).readlink() == tmp_path / "store" / ALL[0]


def test_run_is_not_given_a_broken_shard(sync, run_module, tmp_path):
    sync()
    (tmp_path / "store/shard_00001.parquet").write_bytes(b"PAR1")

    result = run_module(
        shard_sync, state="linked", path=str(tmp_path / "store"), dest=str(tmp_path / "run"), host="worker"
    )

    assert result["failed"]
    assert "worker: 1 file of " in result["msg"] and "(shard_00001.parquet truncated)" in result["msg"]


def test_manifest_is_made_once_and_stays_the_truth(run_module, tmp_path):
    store = fill(tmp_path / "books")
    options = {"path": str(store)}

    checked = run_module(shard_sync, state="described", _check_mode=True, **options)
    assert not (store / "manifest.json").exists()
    made = run_module(shard_sync, state="described", **options)
    (store / "shard_00001.parquet").write_bytes(b"PAR1 broken")
    given = {**options, "source": str(fill(tmp_path / "own", shards=9))}
    assert not run_module(shard_sync, state="imported", **given)["changed"]
    kept = run_module(shard_sync, state="described", **options)

    assert [one["changed"] for one in (checked, made, kept)] == [True, True, False]
    assert checked["manifest"] == made["manifest"] == kept["manifest"]
    assert made["manifest"]["id"] == "books"


@pytest.mark.parametrize(
    ("remove", "told"),
    [
        (ALL[:2], "books holds 1 shard (*.parquet); a data set has at least two"),
        (ALL[4:], "books holds 3 shards (*.parquet), and its tokenizer lacks token_bytes.pt; a data set has"),
    ],
)
def test_folder_that_is_no_data_set_is_told_what_it_lacks(run_module, tmp_path, remove, told):
    store = fill(tmp_path / "books")
    for path in remove:
        (store / path).unlink()

    result = run_module(shard_sync, state="described", path=str(store), host="desktop")

    assert result["failed"]
    assert result["msg"].startswith("desktop: ") and told in result["msg"]


def test_field_07_existing_folder_is_cut_to_the_plan_and_not_copied(run_module, tmp_path):
    source = fill(tmp_path / "base_data_climbmix", shards=9)
    fill(tmp_path, shards=0)  # the tokenizer beside it, where nanochat keeps it
    for path in ("tokenizer/tokenizer.pkl", "tokenizer/token_bytes.pt"):
        (source / path).unlink()
    options = {"path": str(tmp_path / "store"), "source": str(source), "shards": 3}

    checked = run_module(shard_sync, state="imported", _check_mode=True, **options)
    assert not (tmp_path / "store").exists()
    done = run_module(shard_sync, state="imported", **options)
    again = run_module(shard_sync, state="imported", **options)

    store = tmp_path / "store"
    assert sorted(path.name for path in store.glob("*.parquet")) == [f"shard_0000{n}.parquet" for n in (0, 1, 8)]
    assert (store / "shard_00008.parquet").samefile(source / "shard_00008.parquet")
    assert [one["changed"] for one in (checked, done, again)] == [True, True, False]
    assert checked["diff"] == done["diff"]


def test_shards_that_were_made_again_under_the_same_names_are_seen(run_module, tmp_path):
    source = fill(tmp_path / "own", shards=3)
    options = {"path": str(tmp_path / "cache"), "source": str(source)}
    run_module(shard_sync, state="imported", **options)
    (source / ALL[1]).unlink()
    (source / "fresh").write_bytes(b"other words")
    (source / "fresh").replace(source / ALL[0])

    checked = run_module(shard_sync, state="imported", _check_mode=True, **options)
    done = run_module(shard_sync, state="imported", **options)

    assert checked["moved"] == done["moved"] == [ALL[0]]
    assert names(tmp_path / "cache") == [ALL[0], ALL[2], "tokenizer"]
    assert (tmp_path / "cache" / ALL[0]).read_bytes() == b"other words"
    assert not run_module(shard_sync, state="imported", **options)["changed"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shards": 8}, "few holds 3 shards (*.parquet), but 8 are wanted"),
        ({"tokenizer": "/nowhere"}, "/nowhere holds no tokenizer (tokenizer.pkl and token_bytes.pt)"),
    ],
)
def test_what_the_source_lacks_is_said(run_module, tmp_path, options, told):
    source = fill(tmp_path / "few")
    given = {"path": str(tmp_path / "s"), "source": str(source), "host": "desktop", **options}

    result = run_module(shard_sync, state="imported", **given)

    assert result["failed"] and result["msg"].startswith("desktop: ") and told in result["msg"]


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_last_shard_is_always_the_one_for_validation(run_module, tmp_path, count):
    options = {"source": str(fill(tmp_path / "own", shards=4)), "path": str(tmp_path / "s"), "shards": count}
    found = run_module(shard_sync, state="imported", _check_mode=True, **options)["files"]
    shards = [name for name in found if "/" not in name]
    assert len(shards) == (count or 4) and shards[-1] == "shard_00003.parquet"


def test_serves_once_and_stops_what_it_started(run_module, tmp_path):
    store = fill(tmp_path / "books")
    serving = {
        "path": str(store),
        "state": "served",
        "address": "127.0.0.1",
        "allow": ["127.0.0.1"],
        "secret": SECRET,
        "manifest": describe(store),
    }
    stopped = {"path": str(store), "state": "stopped"}

    checked = run_module(shard_sync, _check_mode=True, **serving)
    assert checked["changed"] and checked["server"]["port"] is None and not (store / ".share").exists()
    started = run_module(shard_sync, **serving)
    again = run_module(shard_sync, **serving)
    would = run_module(shard_sync, _check_mode=True, **stopped)
    ended = run_module(shard_sync, **stopped)
    gone = run_module(shard_sync, **stopped)

    assert started["changed"] and not again["changed"]
    assert started["server"] == again["server"] and started["server"]["port"] > 0
    assert [one["changed"] for one in (would, ended, gone)] == [True, True, False]
    assert would["diff"] == ended["diff"] != gone["diff"]
    assert not (store / ".share").exists()
    assert SECRET not in str([started, again, ended])


def test_dead_url_is_named(run_module, tmp_path, monkeypatch):
    monkeypatch.setattr(url, "TRIES", 1)
    options = {"path": str(tmp_path / "s"), "url": "http://127.0.0.1:1/main", "names": ALL[:2]}

    checked = run_module(shard_sync, state="fetched", _check_mode=True, **options)
    failed = run_module(shard_sync, state="fetched", **options, host="desktop")

    assert checked["changed"] and checked["moved"] == ALL[:2]
    assert failed["failed"]
    assert failed["msg"].startswith("desktop: http://127.0.0.1:1/main/shard_0")
    assert "a plain path" in run_module(shard_sync, state="fetched", **{**options, "names": ["../up"]})["msg"]
    told = run_module(shard_sync, state="fetched", **{**options, "url": "https://me:hidden@example.org/x"})
    assert "a URL with a password or token in it" in told["msg"] and "hidden" not in told["msg"]


def test_folder_that_cannot_be_written_is_said(sync, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    told = sync(path=str(tmp_path / "file/data"))
    assert told["failed"] and told["msg"].startswith(f"worker: {tmp_path}/file/data cannot be created: Not a directory")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = sync()
    assert told["failed"] and told["msg"].startswith(f"worker: {tmp_path}/store cannot be written by this user")


@pytest.mark.parametrize(
    "more",
    [
        *({"pieces": pieces} for pieces in ("0a", 7, ["0a"], "0a" * 64)),
        # A part of the digest names the file in which a transfer grows.
        *({"sha256": digest} for digest in ("/../../../ab" + "0" * 52, 5)),
        *({"bytes": size} for size in (-1, "1", 2**51, None)),
        *({"name": name} for name in ("../up", "/etc/passwd", "a/../../b", ".share/x", "", "a//b", "a\n!b")),
    ],
)  # fmt: skip
def test_an_entry_that_is_none_is_refused(sync, master, more):
    master.manifest["shards"][0].update(more)
    told = sync()
    assert told["failed"] and told["msg"].startswith("worker: the manifest's entry"), told


def test_an_error_of_the_file_system_is_told_with_host_and_file(sync, monkeypatch):
    def full(request):
        raise OSError(errno.ENOSPC, "No space left on device", "/data/shard_00001.parquet")

    monkeypatch.setitem(shard_sync.STATES, "synced", full)
    assert sync()["msg"] == "worker: /data/shard_00001.parquet: No space left on device"


def test_a_number_in_place_of_the_entries_is_refused(sync, master):
    master.manifest["shards"] = 5
    assert sync()["msg"].startswith("worker: the manifest's entry 5 below shards is not")


@pytest.mark.parametrize(("host", "order"), [("a", " bcd"), ("b", "a cd"), ("d", "cba "), ("elsewhere", "dcba ")])
def test_the_host_before_is_the_nearest(host, order):
    chain = [{"host": name, "address": "192.0.2.1", "port": 40000} for name in "abcd"]
    before, behind = states.around(host, chain)
    assert ["".join(peer.host for peer in peers) for peers in (before, behind)] == order.split(" ")
