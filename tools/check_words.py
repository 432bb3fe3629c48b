# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds words that users would not search for, and names the usual ones: tools/check_words.py [FILE...].

Texts say NIC, OOM, heartbeat and stuck, as the rest of the world does. Looked at is whatever people read: plugins, roles, playbooks,
the trainer, docs, the inventory. A line that has to hold such a word says so with `words: ok` in a comment.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is not to come back, and what is said instead.
USUAL = {
    r"\bcards?\b": "NIC or network interface, GPU",
    r"\bby radio\b|\bradio (link|interface)": "Wi-Fi",
    r"\bfor want of\b": "out of memory (OOM), without",
    r"\bsigns? of life\b": "heartbeat",
    r"\bwithout a word\b": "without an exit status, silently",
    r"\b(stands?|standing|stood) still\b": "is stuck, makes no progress",
    r"\banew\b": "again, from scratch",
    r"\b(would|will) do\b[.\"']": "use X",
    r"\bmend(s|ed|ing)?\b": "repair",
    r"\b(is|are|was|be) in force\b|\bfirewalls? in force\b": "active",
    r"\bfor ever\b": "forever, without end",
    r"\b(to be had|is at hand)\b": "available",
    r"\bthe ways (between|are)\b": "the connections, the ports",
    r"\bmistakes? of ours\b": "this is a bug in nanochat.ddp",
    r"\bwhoever wants\b": "to ..., do ...",
    r"\bwho wants none\b": "to rule it out, set ...",
    r"\bother than nanochat's\b": "unlike nanochat",
    r"\bfail (since|where) ": "fail if, reject",
}
PATTERNS = {re.compile(pattern, re.I): usual for pattern, usual in USUAL.items()}
SUFFIXES = {".py", ".md", ".yml", ".sh", ".j2", ".html"}
FOLDERS = (
    "plugins",
    "roles",
    "playbooks",
    "trainer",
    "docs",
    "inventory",
    "README.md",
    "CONTRIBUTING.md",
    "demo.sh",
    "train.yml",
)
EXCUSE = "words: ok"
# A docstring that begins with a relative clause has to be read twice; so far these trees have none.
CLAUSES = {re.compile(r'"""What\b(?!.*\?)'): "what it is or does: The bytes of ..., Parse ..., Findings of ..."}
WITHOUT_CLAUSES = ("plugins", "tests/unit", "tests/integration", "bench", "tools")


def problems(text: str, patterns: dict[re.Pattern[str], str] = PATTERNS) -> Iterator[tuple[int, str, str]]:
    """(line, the word found, the usual one) of every line that has one."""
    for number, line in enumerate(text.splitlines(), 1):
        if EXCUSE not in line:
            for pattern, usual in patterns.items():
                if found := pattern.search(line):
                    yield number, found[0], usual


def files(folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Tracked files of folders; by default of those that people read."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES and (ROOT / name).is_file()
    ]


def main(names: list[str]) -> int:
    """Print what was found; 1 if there was anything."""
    bad = 0
    read = [(Path(name), PATTERNS) for name in names]
    read = read or [*((path, PATTERNS) for path in files()), *((path, CLAUSES) for path in files(WITHOUT_CLAUSES))]
    for path, patterns in read:
        for number, found, usual in problems(path.read_text(encoding="utf-8"), patterns):
            print(f"{path}:{number}: {found!r}; say: {usual}")
            bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
