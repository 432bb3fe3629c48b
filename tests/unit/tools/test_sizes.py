# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of sizes in CONTRIBUTING.md is kept: whoever needs more raises it in the commit that needs it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings_table import CATALOGUE
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import HostSettings, RunSettings

ROOT = Path(__file__).resolve().parents[3]
CODE = {".py", ".yml", ".yaml", ".sh", ".j2", ".c", ".js", ".css", ".html", ".cfg", ".toml"}
ROW = re.compile(r"\| ([^|]+) \| ([\d,]+) \|")


def limits() -> dict[str, int]:
    """The table: what is counted, and how many there may be."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("## Sizes")[1].split("##")[0]
    return {name: int(most.replace(",", "")) for name, most in ROW.findall(table)}


def lines(folder: str) -> int:
    """Lines of code below a folder, without links."""
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in CODE and path.is_file()]
    own = [path for path in files if not any(part.is_symlink() for part in (path, *path.parents))]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own if "__pycache__" not in path.parts)


def test_every_part_of_the_repository_keeps_to_its_size() -> None:
    counted = {
        "settings": len(dataclasses.fields(RunSettings)) + len(dataclasses.fields(HostSettings)),
        "findings": len(CATALOGUE),
        "modules": len([path for path in (ROOT / "plugins" / "modules").glob("*.py") if path.stem != "__init__"]),
    }
    too_many = {}
    for name, most in limits().items():
        seen = counted[name] if name in counted else sum(lines(folder) for folder in re.findall(r"`([^`]+)/`", name))
        if seen > most:
            too_many[name] = f"{seen} of {most}"
    assert not too_many, "more than CONTRIBUTING.md allows; take something away, or say there why it needs more"
