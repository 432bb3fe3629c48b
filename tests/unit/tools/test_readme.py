# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""README says in Chinese what it says in English: the same commands, figures, links and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def commands(text: str) -> list[str]:
    """The lines of all blocks, without comments."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return [line.split(" # ")[0].strip() for block in blocks for line in block.splitlines()]


def cells(text: str) -> list[list[str]]:
    """Commands, figures and marks in each row of all tables."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.findall(r"`[^`]+`|\d[\d.,]*(?: %| .?bit/s)?|✔|[-:]{3,}", row) for row in rows]


@pytest.mark.parametrize(
    "part",
    [
        commands,
        cells,
        lambda text: re.findall(r"\]\(([^)]+)\)", text.split("\n", 4)[4]),
        lambda text: re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)),
        lambda text: re.findall(r"^#+", text, re.M),
        lambda text: re.findall(r"\d+(?:\.\d+)?(?= (?:%|.bit/s))", text),
    ],
    ids=["commands", "tables", "links and pictures", "names", "headings", "figures"],
)
def test_the_chinese_readme_has_the_same(part):
    assert part(CHINESE) == part(ENGLISH)
