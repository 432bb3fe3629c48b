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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROBES = "tests/unit/plugins/module_utils/_plan/plan_probes.py"
MACHINES = "tests/pins/data/given/machines.json"
SYNC = """
import json
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.step_model import WAYS
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts
plan = make_plan(hosts({"ddp_sync": "half"})).plan
flags = [node["flags"]["sync"] for node in plan["nodes"]]
print(json.dumps([plan["training"]["sync"], flags, list(WAYS)]))
"""
STAGE = """
import json
from ansible_collections.nanochat.ddp.plugins.module_utils._plan import text
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts
plan = make_plan(hosts({"ddp_stage": "more"}), tolerant=True).plan
node = plan["nodes"][0]
print(json.dumps([plan["run"], node["argv"], node["flags"], text.render(plan)]))
"""


RULES = "trainer/nanochat/rules"
CONTRACT = "plugins/module_utils/_contract"
# ddp_niceness, a made-up setting of a host: files, the text before which a line is put in each, and the line.
NICENESS = {
    f"{CONTRACT}/settings_table.py": (
        "    address: Optional[str] = _host(",
        '    niceness: int = _host(0, "How nice its session is.", low=0, most=19)\n',
    ),
    "plugins/module_utils/_plan/command.py": (
        '        "OMP_NUM_THREADS": ',
        '        "NANOCHAT_NICENESS": str(host.settings.niceness),\n',
    ),
    "plugins/module_utils/_plan/settings_checks.py": ('    "NANOCHAT_BASE_DIR", ', '    "NANOCHAT_NICENESS",\n'),
    "plugins/module_utils/_session/runner.py": (
        "        self.stops = self.interrupts = 0",
        '        os.nice(int((env_file.parse(env or b"") or {}).get("NANOCHAT_NICENESS", "0")))\n',
    ),
}
HOST = """
import json, os, pathlib
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.env_file import render
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.plugins.module_utils._session.runner import LAUNCH, Runner
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts
nodes = make_plan(hosts({"ddp_restarts": 3}, one={"ddp_niceness": 7})).plan["nodes"]
python = {os.path.basename(node[which][0]) for node in nodes for which in ("argv", "session_argv")}
folder = pathlib.Path("session")
folder.mkdir()
env = folder / "env"
env.write_bytes(render(nodes[0]["env"]))
given = {"argv": nodes[0]["argv"], "env_file": str(env), "chdir": "/", "log": "log", "revive": False}
(folder / LAUNCH).write_text(json.dumps({"id": "0", "session": "x", "given": given}))
before = os.nice(0)
Runner(str(folder))
print(json.dumps([os.nice(0) - before, nodes[1]["env"]["NANOCHAT_NICENESS"], *python]))
"""


def followed(folder: Path, edits: Mapping[str, tuple[str, str]], program: str) -> Any:
    """The answer of a program to a copy of the collection with a line more in some files, each before a text."""
    copy = folder / "ansible_collections" / "nanochat" / "ddp"
    shutil.copytree(ROOT / "plugins", copy / "plugins", symlinks=True)
    shutil.copytree(ROOT / "trainer" / "nanochat" / "rules", copy / "trainer" / "nanochat" / "rules")
    for name in (PROBES, MACHINES):
        (copy / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, copy / name)
    for name, (before, line) in edits.items():
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, name
        (copy / name).write_text(text.replace(before, line + before), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_way_of_sync_is_a_row_for_the_planner(tmp_path: Path) -> None:
    row = '    Way("half", "float16", 2.0, 2, 2.0),\n'
    sync, flags, eligible = followed(tmp_path, {f"{RULES}/ways.py": ('    Way("exact", ', row)}, SYNC)
    assert (sync, flags, eligible[0]) == ("half", ["half"] * 2, "half")


def test_a_stage_is_a_row_for_the_planner(tmp_path: Path) -> None:
    row = ', Stage("more", "scripts.more", "more_checkpoints")'
    run, argv, flags, screen = followed(tmp_path, {f"{RULES}/stages.py": (")}", row)}, STAGE)
    assert run == "d4-more" and "scripts.more" in argv and flags["base-checkpoints"].endswith("/d4/base_checkpoints/d4")
    assert "continues the model of the run d4 with scripts.more" in screen


def test_a_setting_with_an_effect_on_its_host_touches_five_files_at_most(tmp_path: Path) -> None:
    """These, and the one that calls what acts for the rank alone; tools/generate_docs.py writes two more."""
    assert len(NICENESS) + 1 <= 5
    assert followed(tmp_path, NICENESS, HOST) == [min(7, 19 - os.nice(0)), "0", "python"]
