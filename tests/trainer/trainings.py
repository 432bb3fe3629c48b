# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole training runs for tests: scripts.base_train on a tiny model, each rank with folders of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import ranks
import torch

from nanochat.run.checkpoint_manager import LOADER_KEY

DATA = ranks.HERE / "golden" / "data"
STEPS = 12
FLAGS = {
    "--kernels": "torch",  # auto would choose other kernels from job to job
    "--depth": 3, "--aspect-ratio": 32, "--head-dim": 32, "--max-seq-len": 64, "--device-batch-size": 2,
    "--total-batch-size": 768, "--num-iterations": STEPS, "--eval-every": -1, "--sample-every": -1,
    "--core-metric-every": -1, "--timeout-seconds": 20,
}  # fmt: skip


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Job:
    """A job in a folder, with a given number of ranks."""

    def __init__(self, folder: Path, world: int, data: Path = DATA) -> None:
        self.folder, self.world, self.data = folder, world, data
        self.more: dict[int, dict[str, str]] = {}  # in the environment of each rank

    def base(self, rank: int) -> Path:
        """NANOCHAT_BASE_DIR of a rank."""
        return self.folder / f"host{rank}"

    def checkpoints(self, rank: int) -> Path:
        return self.base(rank) / "base_checkpoints" / "d3"

    def argv(self, flags: Sequence[str]) -> list[str]:
        given = set(flags)
        kept = [part for flag, value in FLAGS.items() if flag not in given for part in (flag, str(value))]
        return ["-m", "scripts.base_train", *kept, *flags]

    def environment(self, rank: int) -> dict[str, str]:
        base = self.base(rank)
        base.mkdir(parents=True, exist_ok=True)
        if not (base / "tokenizer").exists():
            (base / "tokenizer").symlink_to(self.data / "tokenizer")
        folders = {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DATA_DIR": str(self.data / "base_data_climbmix")}
        # All jobs use one library of matrix products, so that they can be compared bit for bit (forked.always).
        return {**folders, "TEST_ROUTE": "mkl", **self.more.get(rank, {})}

    def start(
        self, *flags: str, slow: bool = False, extra: Mapping[int, Sequence[str]] | None = None
    ) -> list[forked.Python]:
        """Start all ranks; slow: with samples after each step, which leave time to disturb them."""
        pace = ("--sample-every", "1") if slow else ()
        argvs = {rank: self.argv([*flags, *pace, *(extra or {}).get(rank, ())]) for rank in range(self.world)}
        return ranks.start_each([argvs[rank] for rank in range(self.world)], self.environment)

    def run(self, *flags: str) -> list[str]:
        """A whole run without errors; returns what each rank printed."""
        return ranks.passed(ranks.finish(self.start(*flags)))

    def fails(self, *flags: str, extra: Mapping[int, Sequence[str]] | None = None) -> list[ranks.Result]:
        """Run; every rank must refuse it in one sentence."""
        results = ranks.finish(self.start(*flags, extra=extra))
        for result in results:
            assert result.code == 2, result
            assert result.err.startswith("error: "), result.err
            assert len(result.err.strip().splitlines()) == 1, result.err
        return results

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return ranks.events(self.base(rank) / f"metrics-rank{rank}.jsonl", kind)

    def final_digest(self) -> str:
        """The digest of the weights, on which all ranks must agree."""
        digests = {self.events("digest", rank)[-1]["digest"] for rank in range(self.world)}
        assert len(digests) == 1
        assert self.events("digest")[-1]["step"] == STEPS
        return str(digests.pop())

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def routes(self) -> list[str]:
        """The library of matrix products that each rank used, as the last checkpoint says."""
        last = max(self.checkpoints(0).glob("optim_*_rank0.pt"))
        loader = torch.load(last, weights_only=True)[LOADER_KEY]
        return [rank["route"].split("+")[0] for rank in loader["ranks"]]

    def resumes_alike(self, *flags: str) -> None:
        """Resume from the last checkpoint but one; the weights must end as before."""
        before = self.final_digest()
        self.damage(STEPS)
        self.run(*flags, "--resume")
        assert self.final_digest() == before

    def wait_for_step(self, step: int) -> None:
        ranks.wait_until(lambda: len(self.events("step")) > step)

    def damage(self, step: int, *ranks: int) -> None:
        """Damage the weights of a checkpoint of these ranks, by default of all."""
        for path in {self.checkpoints(rank) / f"model_{step:06d}.pt" for rank in ranks or range(self.world)}:
            flip(path)


class Told(Job):
    """A job whose ranks write their phases into files (told_phases.py)."""

    def argv(self, flags: Sequence[str]) -> list[str]:
        return ["-m", "told_phases", *super().argv(flags)[2:]]

    def environment(self, rank: int) -> dict[str, str]:
        return {**super().environment(rank), "TOLD_PHASE": str(self.told(rank))}

    def told(self, rank: int) -> Path:
        return self.folder / f"phase{rank}"

    def phase(self, rank: int) -> str:
        """The phase of a rank; empty before its first."""
        words = self.told(rank).read_text(encoding="ascii").split() if self.told(rank).exists() else []
        return words[0] if words else ""
