# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import errno
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import folder as shards
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests, ManifestEntry, ShardsError
from ansible_collections.nanochat.ddp.tests.unit.plugins.shard_folders import describe, fill
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def store(tmp_path):
    return fill(tmp_path / "books")


def test_manifest_names_shards_in_order_and_the_tokenizer(store):
    manifest = describe(store)

    assert manifest["format"] == 1
    assert manifest["id"] == "books"
    assert [one["name"] for one in manifest["shards"]] == [f"shard_0000{n}.parquet" for n in range(3)]
    assert [one["name"] for one in manifest["tokenizer"]] == ["tokenizer.pkl", "token_bytes.pt"]
    assert [one.path for one in shards.entries(manifest)][-1] == "tokenizer/token_bytes.pt"


def test_digest_stands_for_names_and_bytes(store):
    manifest = describe(store)
    before = shards.digest_of(manifest)
    assert shards.digest_of(describe(store)) == before

    manifest["shards"][0]["sha256"] = "0" * 64
    assert shards.digest_of(manifest) != before


@given(st.text(max_size=12))
def test_no_name_leads_out_of_the_folder(name):
    manifest = {"files": [{"name": name, "bytes": 1, "sha256": "0" * 64}]}
    try:
        path = shards.entries(manifest)[0].path
    except ShardsError:
        return
    assert os.path.normpath(f"/store/{path}") == f"/store/{path}"


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", ".share/server.json", "", "a//b", "a\n!b"])
def test_names_outside_are_refused(name):
    with pytest.raises(ShardsError, match="a plain path inside"):
        shards.entries({"shards": [{"name": name, "bytes": 1, "sha256": "0" * 64}]})


@pytest.mark.parametrize(
    "more", [{"sha256": "/../../../ab" + "0" * 52}, {"sha256": 5}, {"bytes": -1}, {"bytes": "1"}, {"bytes": 2**70}]
)
def test_a_digest_or_size_that_is_none_is_refused(more):
    # A part of the digest names the file in which a transfer grows.
    with pytest.raises(ShardsError, match="below files is not"):
        shards.entries({"files": [{"name": "a", "bytes": 1, "sha256": "0" * 64, **more}]})


def test_entry_without_size_is_named():
    with pytest.raises(ShardsError, match="below shards is not"):
        shards.entries({"shards": [{"name": "shard_00000.parquet"}]})


def test_each_way_of_being_wrong_has_its_name(store):
    manifest = describe(store)
    (store / "shard_00000.parquet").unlink()
    shard = store / "shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    last = store / "shard_00002.parquet"
    last.write_bytes(b"X" + last.read_bytes()[1:])
    (store / "tokenizer/tokenizer.pkl").write_bytes(b"a tokenizer and more")

    states = {one.entry.path: one.state for one in shards.compare(shards.entries(manifest), Digests(str(store)))}

    assert states == {
        "shard_00000.parquet": "missing",
        "shard_00001.parquet": "truncated",
        "shard_00002.parquet": "corrupted",
        "tokenizer/tokenizer.pkl": "oversized",
        "tokenizer/token_bytes.pt": "ok",
    }


def test_unchanged_files_are_not_read_again(store):
    describe(store)

    digests = Digests(str(store))
    assert digests.of("shard_00001.parquet") is not None
    assert digests.hashed_bytes == 0


def test_rot_that_leaves_size_and_time_is_found_by_a_full_look(store):
    manifest = describe(store)
    shard = store / "shard_00001.parquet"
    found = shard.stat()
    shard.write_bytes(b"X" + shard.read_bytes()[1:])
    os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))

    def state(believe: bool) -> str:
        return shards.compare(shards.entries(manifest)[1:2], Digests(str(store), believe))[0].state

    assert state(believe=True) == "ok"
    assert state(believe=False) == "corrupted"


def test_damaged_memory_of_digests_is_no_memory(store):
    describe(store)
    (store / ".digests.json").write_text("{")

    digests = Digests(str(store))
    assert digests.of("shard_00000.parquet") is not None
    assert digests.hashed_bytes > 0


def test_run_folder_holds_exactly_the_manifest(store, tmp_path):
    run, wanted = tmp_path / "run", shards.entries(describe(store))
    (run / "data").mkdir(parents=True)
    (run / "data/shard_00009.parquet").write_bytes(b"of another plan")

    links = shards.plan_links(str(store), str(run), wanted)

    assert links.remove == ["data/shard_00009.parquet"]
    assert shards.apply_links(str(store), str(run), links) == {"hard": 5, "symbolic": 0}
    assert sorted(path.name for path in (run / "data").iterdir()) == [f"shard_0000{n}.parquet" for n in range(3)]
    assert shards.plan_links(str(store), str(run), wanted) == ([], [])


def test_mended_shard_is_linked_anew(store, tmp_path):
    manifest = describe(store)
    wanted = shards.entries(manifest)
    shards.apply_links(str(store), str(tmp_path / "run"), shards.plan_links(str(store), str(tmp_path / "run"), wanted))
    fresh = store / "fresh"
    fresh.write_bytes((store / "shard_00001.parquet").read_bytes())
    fresh.rename(store / "shard_00001.parquet")

    assert shards.plan_links(str(store), str(tmp_path / "run"), wanted).make == ["data/shard_00001.parquet"]


def test_links_across_file_systems_are_symbolic(store, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "elsewhere.parquet"

    assert shards.link(str(store / "shard_00000.parquet"), str(target)) == "symbolic"
    assert target.read_bytes() == (store / "shard_00000.parquet").read_bytes()


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (0, ["a", "b", "c", "d"]),
        (4, ["a", "b", "c", "d"]),
        (9, ["a", "b", "c", "d"]),
        (2, ["a", "d"]),
        (3, ["a", "b", "d"]),
    ],
)
def test_last_shard_is_always_the_one_for_validation(count, chosen):
    assert shards.choose(["d", "b", "c", "a"], count) == chosen


def test_full_disk_is_said_with_need_and_rest(monkeypatch):
    monkeypatch.setattr(shards, "free_bytes", lambda folder: 1_500_000)

    said = r"^laptop: /base/data needs 3.0 GB more, but its file system has 1.5 MB free"
    with pytest.raises(ShardsError, match=said):
        shards.check_space("/base/data", 3_000_000_000, "laptop")


def test_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ShardsError, match=r"^laptop: .*/file/data cannot be created: Not a directory"):
        shards.make_folder(str(tmp_path / "file/data"), "laptop")


def test_files_of_the_same_host_are_linked_not_moved(store, tmp_path):
    manifest = describe(store)
    target = tmp_path / "other"
    target.mkdir()
    digests = Digests(str(target))
    (store / "shard_00002.parquet").write_bytes(b"not any more what the manifest says")

    left = shards.take_seeds(shards.entries(manifest), [str(store)], digests)

    assert [one.path for one in left] == ["shard_00002.parquet"]
    assert (target / "shard_00000.parquet").samefile(store / "shard_00000.parquet")


def test_any_folder_has_a_manifest_of_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.whl").write_bytes(b"b")
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / ".hidden").write_bytes(b"h")

    names = shards.files_below(str(tmp_path), "files")
    found = [one for one in map(Digests(str(tmp_path)).of, names) if one]

    assert shards.entries(shards.manifest_of("wheels", "files", found)) == [
        ManifestEntry("a.whl", 1, "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"),
        ManifestEntry("sub/b.whl", 1, "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"),
    ]
