# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders, ranks, device, dtype and memory, from the environment and the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanochat.kit import common
from nanochat.kit.common import UserError
from nanochat.kit.settings import parse

AVX512 = frozenset(["avx512f", "avx512_bf16"])


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
    with pytest.raises(UserError, match=r"needs about 3.0 GiB .* has 1.0 GiB"):
        common.check_memory(3 * 2**30, "this model", 2**30)


def test_ctrl_c_shows_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert common.exit_code(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_products_in_bfloat16_are_refused_where_they_are_slow() -> None:
    native, other = frozenset(["avx512_bf16"]), frozenset(["avx2"])
    assert common.matmul_type("bf16", {}, native) == "bf16" and common.matmul_type("fp32", {}, other) == "fp32"
    for wanted, environ in (("bf16", {}), ("auto", {"NANOCHAT_DTYPE": "bfloat16"})):
        with pytest.raises(UserError, match="bf16 products would be many times slower than fp32 on this CPU"):
            common.matmul_type(wanted, environ, other)


def test_field_10_words_of_nanochats_scripts_mean_the_same_here() -> None:
    native = frozenset(["avx512_bf16"])
    found = [common.matmul_type("auto", {"NANOCHAT_DTYPE": dtype}, native) for dtype in ("", "float32", "bfloat16")]
    assert found == ["fp32", "fp32", "bf16"]
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
