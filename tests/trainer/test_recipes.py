# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recipes of CONTRIBUTING.md, followed in a copy: nothing else has to be touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import forked
import ranks
from trainings import Job

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


def changed(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, path
    path.write_text(text.replace(before, after), encoding="utf-8")


def test_a_way_of_sync_is_a_row_and_its_wire(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    shutil.copytree(ranks.TRAINER, trainer, ignore=shutil.ignore_patterns("*cache*"))
    changed(trainer / "nanochat/rules/ways.py", "_WAYS = (\n", '_WAYS = (\n    Way("half", "float16", 2.0, 2, 2.0),\n')
    changed(trainer / "nanochat/parallel/wire.py", "WIRES = {\n", ROW)
    job = Copied(tmp_path / "job", 2)
    job.trainer = trainer
    job.run("--sync", "half", "--num-iterations", "2")
    start = job.events("start")[0]
    assert start["settings"]["sync"] == "half"
    assert [event["step"] for event in job.events("step")] == [0, 1]
    assert job.events("digest")[-1]["identical"]
