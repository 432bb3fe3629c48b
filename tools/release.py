# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whether a commit is ready to be released: version, changelog, tag and tree belong together.

    python tools/release.py 0.2.0

CONTRIBUTING.md has the steps of a release.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def version() -> str:
    found = re.search(r"^version: (\S+)$", (ROOT / "galaxy.yml").read_text(encoding="utf-8"), re.M)
    if not found:
        raise SystemExit("galaxy.yml has no line `version: X.Y.Z`.")
    return found[1]


def problems(wanted: str) -> list[str]:
    """Reasons why this commit is not that release."""
    found = []
    if version() != wanted:
        found.append(f"galaxy.yml says version {version()}, not {wanted}; change it there.")
    # CHANGELOG.md escapes the dots of its headings.
    if f"\n  {wanted}:\n" not in (ROOT / "changelogs" / "changelog.yaml").read_text(encoding="utf-8"):
        found.append(f"The changelog has no section v{wanted}; run `antsibull-changelog release`.")
    left = [path.name for path in sorted((ROOT / "changelogs" / "fragments").glob("*.yml"))]
    if left:
        found.append(f"changelog fragments are left ({', '.join(left)}); run `antsibull-changelog release`.")
    if git("status", "--porcelain"):
        found.append("the working tree has changes; commit them.")
    tag = f"v{wanted}"
    if git("tag", "--list", tag) and git("rev-list", "-n", "1", tag) != git("rev-parse", "HEAD"):
        found.append(f"the tag {tag} is on another commit.")
    return found


def main(wanted: str) -> int:
    found = problems(wanted)
    print("\n".join(found) or f"This commit is ready to be released as {wanted}.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
