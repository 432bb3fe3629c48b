# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recipes of CONTRIBUTING.md, followed in a copy: nothing else has to be touched."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import forked
import pytest
import ranks
from trainings import Job

STAGE = '(BASE, SFT, Stage("more", "scripts.more", "more_checkpoints"))'
MORE = """
import sys
from nanochat.kit.common import exit_code
from nanochat.kit.settings import parse_chat
from nanochat.rules.stages import STAGES
from nanochat.run.fine_tuning import inherited
from nanochat.run.program import run_stage
from nanochat.run.stage import RunStage
class More(RunStage):
    folder = STAGES["more"].folder
    def __init__(self, settings):
        self.base = settings
def main():
    settings = parse_chat([*sys.argv[1:], "--conversations", "none"], inherited)
    return run_stage(settings, lambda: More(settings))
sys.exit(exit_code(main))
"""
ROW = 'WIRES = {\n    "half": Wires(Plain(torch.float16), Plain(torch.float16), Plain(torch.float16)),\n'


class Copied(Job):
    """A job of another trainer folder."""

    trainer = Path()

    def environment(self, rank: int) -> dict[str, str]:
        # The choice of products would import the trainer before its folder is named.
        return {name: value for name, value in super().environment(rank).items() if name != "TEST_ROUTE"}

    def start(self, *flags: str, **dummy: object) -> list[forked.Python]:
        dummy2, module, *words = self.argv(flags)
        code = f"import runpy, sys; sys.path.insert(0, {str(self.trainer)!r}); sys.argv = {[module, *words]!r}; "
        code += f"runpy.run_module({module!r}, run_name='__main__')"
        return ranks.start_each([["-c", code]] * self.world, self.environment)


class More(Copied):
    """A run of the made-up stage, in the folders of the run of its base model."""

    def argv(self, flags: Sequence[str]) -> list[str]:
        return ["-m", "scripts.more", *super().argv(flags)[2:]]

    def checkpoints(self, rank: int) -> Path:
        return self.base(rank) / "more_checkpoints" / "d3"


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A copy of the trainer's folder."""
    return shutil.copytree(ranks.TRAINER, tmp_path / "trainer", ignore=shutil.ignore_patterns("*cache*"))


def changed(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, path
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_a_way_of_sync_is_a_row_and_its_wire(trainer: Path, tmp_path: Path) -> None:
    changed(trainer / "nanochat/rules/ways.py", "_WAYS = (\n", '_WAYS = (\n    Way("half", "float16", 2.0, 2, 2.0),\n')
    changed(trainer / "nanochat/parallel/wire.py", "WIRES = {\n", ROW)
    job = Copied(tmp_path / "job", 2)
    job.trainer = trainer
    job.run("--sync", "half", "--num-iterations", "2")
    start = job.events("start")[0]
    assert start["settings"]["sync"] == "half"
    assert [event["step"] for event in job.events("step")] == [0, 1]
    assert job.events("digest")[-1]["identical"]


def test_a_stage_is_a_row_and_its_script(trainer: Path, tmp_path: Path) -> None:
    changed(trainer / "nanochat/rules/stages.py", "(BASE, SFT)", STAGE)
    (trainer / "scripts/more.py").write_text(MORE, encoding="utf-8")
    for kind in (Copied, More):
        job = kind(tmp_path / "job", 2)
        job.trainer = trainer
        job.run("--num-iterations", "2", "--run-dir", str(tmp_path / kind.__name__))
    base, more = (tmp_path / name / "metrics-rank0.jsonl" for name in ("Copied", "More"))
    losses = [[event["loss"] for event in ranks.events(path, "step")] for path in (base, more)]
    assert len(losses[0]) == len(losses[1]) == 2 and losses[1][0] < losses[0][0]
    assert (job.checkpoints(0) / "model_000002.pt").exists()
