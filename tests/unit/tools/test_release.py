# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A release is built the same everywhere, and what does not belong together is named."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tools import release, site_links


def members(packed: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return archive.getmembers()


def test_the_order_of_files_does_not_change_the_bytes() -> None:
    files = {"FILES.json": b"{}", "MANIFEST.json": b"{}", "a/b.py": b"1", "a.sh": b"2"}
    packed = release.pack(files, {"a.sh"}, 1_700_000_000)
    assert packed == release.pack(dict(reversed(list(files.items()))), {"a.sh"}, 1_700_000_000)
    assert packed != release.pack({**files, "a.sh": b"3"}, {"a.sh"}, 1_700_000_000)


def test_nothing_of_the_machine_is_in_the_artifact() -> None:
    packed = release.pack({"FILES.json": b"", "MANIFEST.json": b"", "a/b.sh": b"1"}, {"a/b.sh"}, 5)
    found = {one.name: one for one in members(packed)}
    assert all((one.uid, one.gid, one.uname, one.gname, one.mtime) == (0, 0, "", "", 5) for one in found.values())
    assert (found["a"].mode, found["a/b.sh"].mode, found["FILES.json"].mode) == (0o755, 0o755, 0o644)


def test_what_keeps_a_commit_from_being_a_release_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "galaxy.yml").write_text("name: ddp\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Notes\n\n## v1.2.3\n")
    fragments = tmp_path / "changelogs" / "fragments"
    fragments.mkdir(parents=True)
    said = {
        ("tag", "--list", "v1.2.3"): "v1.2.3",
        ("rev-list", "-n", "1", "v1.2.3"): "abc",
        ("rev-parse", "HEAD"): "abc",
    }
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "git", lambda *words: said.get(words, ""))
    assert release.problems("1.2.3") == []

    said[("rev-list", "-n", "1", "v1.2.3")] = "another"
    said[("status", "--porcelain")] = " M README.md"
    (fragments / "new.yml").write_text("---\n")
    (tmp_path / "CHANGELOG.md").write_text("# Notes\n")
    (tmp_path / "galaxy.yml").write_text("version: 1.2.2\n")
    assert [
        len([one for one in release.problems("1.2.3") if word in one])
        for word in ("1.2.2", "section", "new.yml", "tree", "tag")
    ] == [1] * 5


def test_links_of_the_repository_lead_somewhere_on_the_site() -> None:
    fitted = site_links.fitted(
        "[a](docs/settings.md#x) [b](CHANGELOG.md) [c](trainer) [d](https://example.com) [e](#here)", "README.md"
    )
    assert fitted == (
        f"[a](settings.md#x) [b](changelog.md) [c]({site_links.repository()}/tree/main/trainer) [d](https://example.com) [e](#here)"
    )
    with pytest.raises(SystemExit, match="leads nowhere"):
        site_links.fitted("[a](no/such/page.md)", "README.md")


def test_every_page_names_the_repository_as_galaxy_yml_does() -> None:
    root = release.ROOT
    address = site_links.repository()
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob(".github/**/*.yml"), root / "galaxy.yml"]
    named = {
        f"{page.relative_to(root)}: {found}"
        for page in pages
        for found in re.findall(r"https?://[\w.-]+/[\w-]+/nanochat\.ddp", page.read_text(encoding="utf-8"))
        if found != address
    }
    assert not named, f"galaxy.yml says {address}; named otherwise in {named}"
