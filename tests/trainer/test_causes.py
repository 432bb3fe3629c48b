# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The document lists every cause, and the trainer uses every one."""

from __future__ import annotations

import re

import ranks

from nanochat.rules.causes import Cause

CONTRACT = ranks.HERE.parents[1] / "docs" / "architecture.md"


def test_the_document_shows_every_cause_and_no_other() -> None:
    table = CONTRACT.read_text(encoding="utf-8").partition("| cause | means |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\S+) \| (.*) \|$", table, re.M) == [(cause.value, cause.meaning) for cause in Cause]


def test_every_cause_is_given_somewhere() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted(ranks.TRAINER.rglob("*.py"))]
    code = "\n".join(text for text in sources if "class Cause(" not in text)
    # A run that finishes has no error that could carry its cause.
    unused = {cause for cause in Cause if f"Cause.{cause.name}" not in code} - {Cause.FINISHED}
    assert not unused
