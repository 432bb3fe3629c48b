# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recipes of CONTRIBUTING.md, followed in a copy: nothing else has to be touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBES = "tests/unit/plugins/module_utils/_plan/plan_probes.py"
PROGRAM = """
import json
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import eligible, job_of
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts
plan = make_plan(hosts({"ddp_sync": "half"})).plan
flags = [node["flags"]["sync"] for node in plan["nodes"]]
print(json.dumps([plan["training"]["sync"], flags, eligible(job_of(plan))]))
"""


def test_a_way_of_sync_is_a_row_for_the_planner(tmp_path: Path) -> None:
    copy = tmp_path / "ansible_collections" / "nanochat" / "ddp"
    shutil.copytree(ROOT / "plugins", copy / "plugins", symlinks=True)
    shutil.copytree(ROOT / "trainer" / "nanochat" / "rules", copy / "trainer" / "nanochat" / "rules")
    (copy / PROBES).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROBES, copy / PROBES)
    table = copy / "trainer" / "nanochat" / "rules" / "ways.py"
    text = table.read_text(encoding="utf-8")
    table.write_text(
        text.replace("_WAYS = (\n", '_WAYS = (\n    Way("half", "float16", 2.0, 2, 2.0),\n'), encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sync, flags, eligible = json.loads(done.stdout)
    assert (sync, flags, eligible[0]) == ("half", ["half"] * 2, "half")
