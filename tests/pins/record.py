# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records what the product does now as what it must do: `tests/pins/record.py [TOPIC]...`, by default all topics.

Look at each difference before it is committed, and say in that commit why it is right; this file and doors.py change in other commits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ansible" / "collections"))
from ansible_collections.nanochat.ddp.tests.pins import compact, doors

SEEN = doors.PINS / "data" / "seen"
PYTHON = f"{os.environ.get('TRAINER_VENV') or Path.home() / '.cache/nanochat-ddp/tests-venv'}/bin/python"

# What is pinned: with the cases of data/given/TOPIC.json and a folder to work in, what is seen, each part a file of its own.
TOPICS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "plans": lambda cases, folder: doors.plans(cases),
    "choices": lambda cases, folder: {"all": doors.choices(cases)},
    "findings": lambda cases, folder: {"all": doors.findings(cases)},
    "runs": doors.runs,
    "environment": lambda case, folder: {"all": doors.environment(case, folder)},
    "training": lambda case, folder: {"all": doors.training(case, folder, PYTHON)},
}


def file_of(topic: str, part: str) -> Path:
    """Where a part is kept."""
    return SEEN / topic / f"{part.replace(',', '').replace(' ', '-')}.json"


def seen(topic: str, folder: Path) -> dict[str, Any]:
    """What is seen of a topic now, as JSON has it."""
    told: dict[str, Any] = json.loads(json.dumps(TOPICS[topic](doors.given(topic), folder)))
    return told


def recorded(topic: str) -> dict[str, Any]:
    """What was recorded of it, by file name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((SEEN / topic).glob("*.json"))}


def main() -> None:
    for topic in sys.argv[1:] or TOPICS:
        with tempfile.TemporaryDirectory(prefix="pins-") as folder:
            told = seen(topic, Path(folder))
        shutil.rmtree(SEEN / topic, ignore_errors=True)
        (SEEN / topic).mkdir(parents=True)
        for part, content in told.items():
            file_of(topic, part).write_text(compact.dump(content) + "\n", encoding="utf-8")
        print(f"{topic}: {len(told)} files in {SEEN / topic}")


if __name__ == "__main__":
    main()
