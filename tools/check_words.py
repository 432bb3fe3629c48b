# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds words that users would not search for, and suggests the usual ones.

Texts say NIC, OOM, heartbeat and stuck, like the rest of the world. Checks everything that people read: plugins, roles, playbooks,
the trainer, docs, the inventory. Mark a line that needs such a word with a comment `words: ok`.

It also finds class names that stand for two things in the collection and the trainer.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Phrases to avoid, and their replacements.
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
    r"\bof which the\b": "whose",
    r"\bwhat is told\b|\b(is|are) told\b": "is reported, printed, logged",
    r"\bg[ia]ve(s|n)? no answer\b": "does not answer",
    r"\bgo(es)? on from\b": "resumes from, continues",
    r"\bgo(es)? together with\b": "can be combined with, works with",
    r"\bin the place of\b": "instead of",
    r"\bis no (name|Python|JSON|text|valid)\b": "is not a ...",
    r"\bmade again\b": "repeated, rebuilt",
    r"\bas ever\b|\ball the same\b": "still, anyway",
    r"\b(taken|take) out by hand\b|\blet in again\b": "removed by hand, readmitted",
}
PATTERNS = {re.compile(pattern, re.I): usual for pattern, usual in USUAL.items()}
SUFFIXES = {".py", ".md", ".yml", ".sh", ".j2", ".html"}
FOLDERS = ("plugins", "roles", "playbooks", "trainer", "docs", "inventory", ":(glob)*.md", ":!CHANGELOG.md", "demo.sh")
EXCUSE = "words: ok"
RECORDED = "docs/transcript"  # as a run printed it
# A docstring that begins with a relative clause has to be read twice; so far these trees have none.
CLAUSES = {
    re.compile(r'"""What\b(?!.*\?)'): "what it is or does: The bytes of ..., Parse ..., Findings of ...",
    re.compile(r'"""By (which|what)\b'): "Sort key: ..., The id of ...",
}
WITHOUT_CLAUSES = ("plugins", "tests/unit", "tests/integration", "bench", "tools")
WITH_CLASSES = ("plugins", "trainer")
# Class names that Ansible prescribes.
PRESCRIBED = {"ActionModule", "CallbackModule", "FilterModule", "InventoryModule", "LookupModule", "ModuleDocFragment"}


def problems(text: str, patterns: dict[re.Pattern[str], str] = PATTERNS) -> Iterator[tuple[int, str, str]]:
    """(line, phrase found, replacement) of every match."""
    for number, line in enumerate(text.splitlines(), 1):
        if EXCUSE not in line:
            for pattern, usual in patterns.items():
                if found := pattern.search(line):
                    yield number, found[0], usual


def classes(path: Path) -> Iterator[ast.ClassDef]:
    """The classes of a file, without the documents of the contract, which are named like their keys."""
    documents = {"TypedDict"} if path.parent.name == "_contract" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            if documents & {base.id for base in node.bases if isinstance(base, ast.Name)}:
                documents.add(node.name)
            else:
                yield node


def doubles(paths: Iterable[Path]) -> Iterator[tuple[Path, int, str]]:
    """(file, line, problem) of every class whose name an earlier class has."""
    first: dict[str, str] = {}
    for path in paths:
        # The rules of the collection are links to those of the trainer.
        for node in () if path.suffix != ".py" or path.is_symlink() else classes(path):
            place = first.setdefault(node.name, f"{path}:{node.lineno}")
            if place != f"{path}:{node.lineno}" and node.name not in PRESCRIBED:
                yield path, node.lineno, f"the class {node.name} has the name of that of {place}"


def files(folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Tracked files of folders; by default those that people read."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        ROOT / name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in SUFFIXES and (ROOT / name).is_file() and not name.startswith(RECORDED)
    ]


def main() -> int:
    """Print all matches; 1 if there are any."""
    found = [
        f"{path}:{number}: {phrase!r}; say: {usual}"
        for paths, patterns in ((files(), PATTERNS), (files(WITHOUT_CLAUSES), CLAUSES))
        for path in paths
        for number, phrase, usual in problems(path.read_text(encoding="utf-8"), patterns)
    ]
    found += [f"{path}:{number}: {problem}" for path, number, problem in doubles(files(WITH_CLASSES))]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
