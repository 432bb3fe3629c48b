# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes lab/faults.md from what the scenario faults has found, and from runs without any fault.

FAULTS_RESULTS=/tmp/faults.json ./test.sh molecule:faults
FAULTS_RUNS=/tmp/runs.jsonl tests/molecule/faults/no_false_alarm.sh 10
python3 tests/molecule/faults/table.py /tmp/faults.json /tmp/runs.jsonl >lab/faults.md
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEAD = """# Reproduced faults

<!-- Written by tests/molecule/faults/table.py from the results of the scenario faults and of no_false_alarm.sh. -->

Faults that people met when training on two home machines, reproduced on two hosts reached over ssh: firewalls, orphans on
the port, cut and slow links, frozen and full machines, killed ranks. Seconds count until the fault is named: the whole command for
*preflight*, *plan* and *doctor*, and for *watch* the time since the fault in a watched run, including the default patience
(45 s without progress). The machine was busy with other work; the last table shows how busy. docs/troubleshooting.md explains
each code.

| # | fault | named as | seconds | by |
|---:|---|---|---:|---|
"""
RUNS = """
## Runs without faults

Whole runs from preflight to the report, one after the other (the scenario includes one):
`tests/molecule/faults/no_false_alarm.sh {count}`. A false alarm is a warning or error of preflight or rehearsal, a call for the
doctor, or an exit code: **{alarms} of {count} runs had one**. The two hosts were containers on a shared machine; the last
column holds the warnings about that, which were true.

| run | seconds | false alarms | true of the machine |
|---:|---:|---|---|
"""
# Faults tested without a container.
ELSEWHERE = {
    10: ("a CPU run on a host with a GPU, or bf16 products on a CPU without them", "float32, or refused", "field_10"),
    25: ("a host is on Wi-Fi", "nic-wifi", "field_25"),
}  # fmt: skip


def tests_of(mark: str) -> list[str]:
    """The files below tests/ with a test of that name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if re.search(rf"def test_{mark}_", path.read_text())]


def rows(results: list[dict]) -> list[str]:
    """One line a fault, by number."""
    lines = [
        (one["field"], f"| {one['field']} | {one['fault']} | {one['code']} | {one['seconds']:.0f} | {one['when']} |")
        for one in results
    ]
    for number, (fault, code, mark) in ELSEWHERE.items():
        files = [path for path in tests_of(mark) if "molecule" not in path]
        lines.append((number, f"| {number} | {fault} | {code} | | {', '.join(files)} |"))
    return [line for dummy, line in sorted(lines, key=lambda pair: pair[0])]


def runs_text(runs: list[dict]) -> str:
    """Findings of runs without any fault, one line per run."""
    lines = [
        f"| {number} | {run['seconds']} | {'; '.join(run['alarms']) or 'none'} | {'; '.join(run['surroundings'])} |"
        for number, run in enumerate(runs, 1)
    ]
    alarmed = sum(bool(run["alarms"]) for run in runs)
    return RUNS.format(count=len(runs), alarms=alarmed or "none") + "\n".join(lines) + "\n"


def main() -> int:
    results = json.loads(Path(sys.argv[1]).read_text())
    runs = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
    missing = set(range(1, 26)) - {one["field"] for one in results} - set(ELSEWHERE)
    sys.stdout.write(HEAD + "\n".join(rows(results)) + "\n" + runs_text(runs))
    if missing:
        print(f"entries without a result: {sorted(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
