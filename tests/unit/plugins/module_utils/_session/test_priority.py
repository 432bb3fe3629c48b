# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A process that yields to others, and everything that it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._session import runner

TELL = """
import json, os, threading
found = []
def tell():
    oom = open("/proc/self/oom_score_adj").read().strip()
    found.append([os.sched_getscheduler(0) == os.SCHED_IDLE, os.getpriority(os.PRIO_PROCESS, 0), oom])
thread = threading.Thread(target=tell)
thread.start()
thread.join()
print(json.dumps(found[0]))
"""


def test_a_job_and_its_threads_inherit_the_lowest_priority() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TELL], capture_output=True, start_new_session=True, check=True, preexec_fn=runner.yield_to_others
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, 19, "1000"]


def test_without_rights_for_it_nothing_fails(tmp_path: Path) -> None:
    code = "import os\ndef refuse(*dummy): raise PermissionError\nos.sched_setscheduler = refuse\n"
    code += f"from {runner.__name__} import yield_to_others as polite\npolite({str(tmp_path)!r})\nprint(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "19\n"
