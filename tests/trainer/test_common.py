# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders, ranks, device, dtype, processors and memory, from the environment and the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.kit import common
from nanochat.kit.common import UserError
from nanochat.kit.settings import parse
from nanochat.rules.model_size import ModelConfig
from nanochat.run.setup import check_memory


def test_memory_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    def memory() -> tuple[int | None, int | None]:
        return common.memory_limit(tmp_path), common.memory_available(tmp_path)

    assert memory() == (None, None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1024 kB\nMemAvailable:    512 kB\n")
    assert memory() == (2**20, 2**19)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1024\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert memory() == (4096, 3072)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory() == (2**20, 2**19)


def test_a_model_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "memory_limit", lambda: 2**30)
    check_memory(ModelConfig.from_depth(4))
    with pytest.raises(UserError, match=r"a model of 286,261,730 parameters needs more than 3.2 GiB .* has 1.0 GiB"):
        check_memory(ModelConfig.from_depth(12))


def test_ctrl_c_shows_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert common.exit_code(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_field_10_words_of_nanochats_scripts_mean_the_same_here() -> None:
    native = frozenset(["avx512_bf16"])
    found = [common.matmul_type("auto", {"NANOCHAT_DTYPE": dtype}, native) for dtype in ("", "float32", "bfloat16")]
    assert found == ["fp32", "fp32", "bf16"]
    for wanted, environ in (("bf16", {}), ("auto", {"NANOCHAT_DTYPE": "bfloat16"})):
        with pytest.raises(UserError, match="bf16 products would be many times slower than fp32 on this CPU"):
            common.matmul_type(wanted, environ, frozenset(["avx2"]))
    for dtype in ("float16", "float64"):
        with pytest.raises(UserError, match=f"NANOCHAT_DTYPE={dtype}: this trainer keeps all numbers in float32"):
            common.matmul_type("auto", {"NANOCHAT_DTYPE": dtype}, native)
    common.check_device("cpu")
    common.check_device("")
    for device in ("cuda", "mps"):
        with pytest.raises(
            UserError, match=f"--device-type {device}: this trainer trains on CPUs only; use --device-type cpu"
        ):
            parse(["--device-type", device])


PROGRAM = (
    "import os; from nanochat.kit.common import pin_to_cores; pin_to_cores(); print(sorted(os.sched_getaffinity(0)))"
)


def pinned(cores: str) -> tuple[list[int], str]:
    environ = {**os.environ, "NANOCHAT_CORES": cores}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.strip("[]\n").split(",")], done.stderr


def test_field_33_a_rank_stays_on_the_processors_of_the_plan():
    here = sorted(os.sched_getaffinity(0))
    assert pinned(str(here[-1])) == ([here[-1]], "")
    assert pinned(",".join(map(str, here))) == (here, "")
    assert pinned("") == (here, "")
    # Those that are gone are told, and harm nothing.
    for cores in ("9999", "x"):
        found, said = pinned(cores)
        assert found == here and f"NANOCHAT_CORES is {cores}" in said
