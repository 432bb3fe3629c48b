# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The findings of a run without any fault: one line of JSON, and exit code 1 if one of them is a false alarm.

python3 alarms.py RESULTS SECONDS EXIT_CODE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# What other work on this machine makes true is no false alarm; it is written down all the same.
SURROUNDINGS = os.environ.get("FAULTS_SURROUNDINGS", "host-busy other-training memory-tight").split()


def findings(folder: Path) -> list[str]:
    """Warnings and errors of preflight and of the rehearsal, and the doctor's verdict if it was called."""
    judged = [folder / "findings.json", *folder.glob("*/rehearsal.json")]
    if len(judged) < 2 or not judged[0].exists():
        return ["nothing-judged: preflight or the rehearsal left no findings at all"]
    told = [one for path in judged for one in json.loads(path.read_text())["findings"] if one["severity"] != "info"]
    told += [json.loads(path.read_text())["verdict"] for path in folder.glob("*/doctor.json")]
    return list(dict.fromkeys(f"{one['code']}: {one['host']}: {one['seen']}" for one in told))


def main() -> int:
    folder, seconds, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    told = findings(folder)
    surroundings = [line for line in told if line.split(":", maxsplit=1)[0] in SURROUNDINGS]
    false = [line for line in told if line not in surroundings] + ([f"exit code {code}"] if code else [])
    print(json.dumps({"seconds": seconds, "alarms": false, "surroundings": surroundings}))
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
