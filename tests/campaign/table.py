# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of rounds in a page of Markdown, to which each run of the campaign adds its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- rounds: written by tests/campaign/run.sh --report -->", "<!-- end of rounds -->"
HEAD = "| seed | round | playbook, from | moment | fault | lasted | messages | repaired by | outcome |"
KEPT = "as undisturbed"


class Round(NamedTuple):
    """An action and its result."""

    seed: int
    number: int
    playbook: str
    moment: str
    fault: str
    lasted: str
    messages: str
    repaired_by: str
    outcome: str


def row(one: Round) -> str:
    return f"| {' | '.join(' '.join(str(cell).replace('|', '/').split()) or '-' for cell in one)} |"


def rows_in(page: str) -> list[str]:
    """The rounds that the page holds already."""
    if BEGIN not in page or END not in page:
        return []
    inside = page.partition(BEGIN)[2].partition(END)[0]
    return [line for line in inside.splitlines() if line.startswith("| ") and line != HEAD]


def summary(rows: Sequence[str]) -> str:
    good = sum(line.endswith(f"| {KEPT} |") for line in rows)
    seeds = len({line.split(" | ")[0] for line in rows})
    what = "ended with the weights and the optimizer of the undisturbed run, to the bit"
    return (
        f"{len(rows)} rounds of {seeds} seed{'' if seeds == 1 else 's'}: {good} {what}, {len(rows) - good} otherwise."
    )


def add(path: Path, rounds: Sequence[Round]) -> None:
    """Write the page with these rounds behind those that it has."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [*rows_in(page), *(row(one) for one in rounds)]
    columns = HEAD.count("|") - 1
    table = "\n".join([BEGIN, "", summary(rows), "", HEAD, "|" + "---|" * columns, *rows, "", END])
    before, dummy, rest = page.partition(BEGIN)
    text = before + table + rest.partition(END)[2] if rest else (page.rstrip() + "\n\n" if page else "") + table + "\n"
    path.write_text(text, encoding="utf-8")
