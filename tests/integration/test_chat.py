# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chat on two hosts of this machine: with the newest model, on the host that has it."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import one_line
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage


def trained(run: Path, step: int) -> None:
    """Make the folder of a run whose newest checkpoint is of this step."""
    folder = run / "base_checkpoints" / "d4"
    folder.mkdir(parents=True)
    for name in (f"model_{step:06d}.pt", f"meta_{step:06d}.json"):
        (folder / name).write_text("{}")
    (run / "training.json").write_text(json.dumps({"id": f"{1:016x}", "number": 1, "begun": 1}))
    (run / "metrics-rank0.jsonl").write_text(
        json.dumps({"kind": "step", "step": step, "time": 1.0, "loss": 1.0}) + "\n"
    )
    (run / "session.json").write_text(json.dumps({"started": 1.0, "ended": 2.0, "exit_code": 0}))


def test_chat_takes_the_model_that_has_come_furthest(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "ab")
    for name, step in (("a", 300), ("b", 1000)):
        trained(tmp_path / name / "runs" / "d4", step)
    # Without a plan it does not know how to start the trainer.
    told = one_line(stage.play("nanochat.ddp.chat", "-e", "prompt=hello", code=2))
    assert f"b: {tmp_path}/b/runs/d4/plan.json is missing or damaged" in told, told
    program = tmp_path / "b/venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "says $@ of $NANOCHAT_BASE_DIR"\n[ "$7" != --prompt=fail ]\n')
    program.chmod(0o755)
    plan = fake_run.plan_for([tmp_path / name / "runs/d4" for name in "ab"], 1000, hosts="ab")
    for node in plan["nodes"]:
        node |= {"venv_dir": f"{node['base_dir']}/venv", "trainer_dir": str(tmp_path)}
    fake_run.write_json(tmp_path / "b/runs/d4/plan.json", signed(plan))
    told = stage.play("nanochat.ddp.chat", "-e", "prompt=hello")
    said = "-m scripts.chat_cli --temperature=0.6 --top-k=50 --seed=42 --max-tokens=256 --prompt=hello"
    assert f"says {said} of {tmp_path}/b/runs/d4\n" in told, told
    assert "Loading the model of d4 on b;" in told
    failed = one_line(stage.play("nanochat.ddp.chat", "-e", "prompt=fail", code=2))
    assert "b: the model could not be asked: says -m scripts.chat_cli" in failed, failed
