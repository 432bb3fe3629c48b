# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the links of the repository's Markdown fit the docs site: `python tools/site_links.py FOLDER`.

A link to a page of the site leads to that page; one to another file or folder of the repository leads to the repository, whose
address stands in galaxy.yml and nowhere else.
"""

from __future__ import annotations

import re
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


def target_of(link: str, home: Path) -> str:
    """Where a link of a page in this folder of the repository leads on the site."""
    path = (home / link).resolve()
    if not path.exists() or ROOT not in path.parents:
        raise SystemExit(f"{home}: the link {link} leads nowhere")
    name = path.relative_to(ROOT).as_posix()
    if name in RENAMED:
        return RENAMED[name]
    if path.parent == ROOT / "docs" and path.suffix == ".md":
        return path.name
    if path.parent == ROOT / "docs" / "images":
        return f"images/{path.name}"
    return f"{repository()}/{'tree' if path.is_dir() else 'blob'}/main/{name}"


def fitted(text: str, home: Path) -> str:
    return LINK.sub(lambda found: f"{found[1]}{target_of(found[2], home)}{found[3] or ''}{found[4]}", text)


def main(folder: Path) -> None:
    at_top = set(RENAMED.values())
    for page in folder.glob("*.md"):
        home = ROOT if page.name in at_top else ROOT / "docs" / "site" if page.name == "index.md" else ROOT / "docs"
        page.write_text(fitted(page.read_text(encoding="utf-8"), home), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
