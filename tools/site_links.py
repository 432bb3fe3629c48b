# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copies the repository's Markdown and pictures to where the docs site is made: `python tools/site_links.py FOLDER`.

A link to a page of the site leads to that page; one to another file or folder of the repository leads to the repository, whose
address stands in galaxy.yml and nowhere else.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)]*)?(\))")
# Pages that have another name on the site than in the repository.
RENAMED = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}


def repository() -> str:
    return re.findall(r"^repository: (\S+)$", (ROOT / "galaxy.yml").read_text(encoding="utf-8"), re.M)[0]


def place_of(name: str) -> str | None:
    """Where a file of the repository lies on the site; None if it is not there."""
    if name in RENAMED:
        return RENAMED[name]
    if name.startswith("docs/site/"):
        return name.removeprefix("docs/site/")
    if name.startswith(("docs/", "lab/")) and name.endswith((".md", ".svg", ".png")):
        return name.removeprefix("docs/")
    return None


def target_of(link: str, page: str) -> str:
    """Where a link on a page of the repository leads on the site."""
    path = ((ROOT / page).parent / link).resolve()
    if not path.exists() or ROOT not in path.parents:
        raise SystemExit(f"{page}: the link {link} leads nowhere")
    name = path.relative_to(ROOT).as_posix()
    place = place_of(name)
    if place is None:
        return f"{repository()}/{'tree' if path.is_dir() else 'blob'}/main/{name}"
    return os.path.relpath(place, Path(place_of(page) or page).parent)


def main(folder: Path) -> None:
    """Copy every page and picture of the repository to its place on the site, with links that fit there."""
    pages = [ROOT / name for name in RENAMED]
    for path in [*pages, *(ROOT / "docs").rglob("*"), *(ROOT / "lab").rglob("*")]:
        name = path.relative_to(ROOT).as_posix()
        place = place_of(name)
        if place is None or not path.is_file():
            continue
        copy = folder / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(fitted(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        else:
            shutil.copy(path, copy)


def fitted(text: str, page: str) -> str:
    """The text of a page with links that fit its place on the site."""
    return LINK.sub(lambda found: f"{found[1]}{target_of(found[2], page)}{found[3] or ''}{found[4]}", text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
