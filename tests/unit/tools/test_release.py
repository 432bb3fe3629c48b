# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A commit that is no release is refused with the reasons, and the pages of the repository belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tools import release


def test_what_keeps_a_commit_from_being_a_release_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "galaxy.yml").write_text("name: ddp\nversion: 1.2.3\n")
    fragments = tmp_path / "changelogs" / "fragments"
    fragments.mkdir(parents=True)
    (tmp_path / "changelogs" / "changelog.yaml").write_text("---\nreleases:\n  1.2.3:\n    changes: {}\n")
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
    (tmp_path / "changelogs" / "changelog.yaml").write_text("---\nreleases:\n")
    (tmp_path / "galaxy.yml").write_text("version: 1.2.2\n")
    assert [
        len([one for one in release.problems("1.2.3") if word in one])
        for word in ("1.2.2", "section", "new.yml", "tree", "tag")
    ] == [1] * 5


PAGES = [page for pattern in ("*.md", "docs/**/*.md", "lab/*.md") for page in release.ROOT.glob(pattern)]


def test_this_version_has_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "git", lambda *words: "")
    assert not [one for one in release.problems(release.version()) if "section" in one]


def test_links_between_pages_lead_somewhere() -> None:
    links = [
        (page.relative_to(release.ROOT).as_posix(), link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s:#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "{toctree}" not in link and not (page.parent / link).exists()
    ]
    assert not links


def test_every_page_names_the_repository_as_galaxy_yml_does() -> None:
    files = [*PAGES, *release.ROOT.glob(".github/**/*.yml"), release.ROOT / "galaxy.yml"]
    named = {
        found
        for file in files
        for found in re.findall(r"https?://[\w.-]+/[\w-]+/nanochat\.ddp", file.read_text("utf-8"))
    }
    assert named == set(re.findall(r"^repository: (\S+)$", (release.ROOT / "galaxy.yml").read_text("utf-8"), re.M))
