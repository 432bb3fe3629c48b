# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders, ranks, device, dtype and memory, from the environment and the machine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from nanochat.kit import common
from nanochat.kit.common import UserError

AVX512 = frozenset(["avx512f", "avx512_bf16"])


def test_folders_follow_the_environment() -> None:
    environ = {"NANOCHAT_BASE_DIR": "/base"}
    assert common.data_dir(environ) == Path("/base/base_data_climbmix")
    assert common.data_dir({**environ, "NANOCHAT_DATA_DIR": "/data"}) == Path("/data")
    assert common.checkpoint_dir("d4", environ) == Path("/base/base_checkpoints/d4")
    assert common.base_dir({}) == Path.home() / ".cache" / "nanochat"


def test_ranks_are_what_torchrun_says() -> None:
    assert common.read_ranks({}) == (0, 0, 1)
    assert common.read_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == (3, 1, 4)
    with pytest.raises(UserError, match="RANK=4 is outside WORLD_SIZE=4"):
        common.read_ranks({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(UserError, match="whole numbers"):
        common.read_ranks({"RANK": "first"})


def test_field_10_a_cpu_run_is_float32_even_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert common.choose_device("cpu") == "cpu"
    assert common.choose_dtype("cpu", {}, AVX512).name == "float32"
    assert common.choose_dtype("cuda", {}).name == "bfloat16"


@pytest.mark.parametrize(
    ("wanted", "flags", "words"),
    [
        ("bfloat16", frozenset(["avx2"]), "NANOCHAT_DTYPE=bfloat16 would be many times slower"),
        ("float16", AVX512, "NANOCHAT_DTYPE=float16"),
        ("float64", AVX512, "NANOCHAT_DTYPE=float64 is not one of"),
    ],
)
def test_a_dtype_that_the_cpu_does_badly_is_refused(wanted: str, flags: frozenset[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        common.choose_dtype("cpu", {"NANOCHAT_DTYPE": wanted}, flags)


def test_bfloat16_is_there_for_those_who_ask_on_a_cpu_that_has_it() -> None:
    choice = common.choose_dtype("cpu", {"NANOCHAT_DTYPE": "bfloat16"}, AVX512)
    assert choice.dtype == torch.bfloat16
    assert "avx512_bf16" in choice.reason


def test_cpu_flags_of_x86_and_arm(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor : 0\nflags\t\t: fpu amx_bf16\n\nprocessor : 1\nflags\t\t: fpu amx_bf16\n")
    arm.write_text("Features\t: fp asimd bf16\n")
    assert common.cpu_flags(x86) == {"fpu", "amx_bf16"}
    assert common.cpu_flags(arm) == {"fp", "asimd", "bf16"}
    assert common.cpu_flags(tmp_path / "none") == frozenset()


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


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*/file/below, the folder for checkpoints"):
        common.writable_folder(tmp_path / "file" / "below", "checkpoints")
    assert list(common.writable_folder(tmp_path / "new" / "folder", "checkpoints").iterdir()) == []


def test_a_user_error_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError("this\n  went wrong.")

    assert common.exit_code(fail) == 2
    assert capsys.readouterr().err == "error: this went wrong.\n"
    assert common.exit_code(lambda: None) == 0


def test_ctrl_c_shows_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert common.exit_code(interrupted) == 130
    assert capsys.readouterr().err == ""


def test_a_folder_is_tried_by_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in two containers, where process ids may be equal.
    monkeypatch.setattr(os, "getpid", lambda: 7)
    failures: list[UserError] = []

    def probe() -> None:
        for dummy in range(500):
            try:
                common.writable_folder(tmp_path, "checkpoints")
            except UserError as error:
                failures.append(error)

    threads = [threading.Thread(target=probe) for dummy in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []


def test_products_in_bfloat16_are_refused_where_they_are_slow() -> None:
    common.check_matmul("cpu", "bf16", frozenset(["avx512_bf16"]))
    common.check_matmul("cpu", "fp32", frozenset())
    common.check_matmul("cuda", "bf16", frozenset())
    with pytest.raises(UserError, match="--matmul bf16 would be many times slower"):
        common.check_matmul("cpu", "bf16", frozenset(["avx2"]))


def test_what_cannot_be_computed_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="NANOCHAT_DTYPE=float16 is too coarse"):
        common.choose_dtype("cuda", {"NANOCHAT_DTYPE": "float16"})
    with pytest.raises(UserError, match="MPS lacks"):
        common.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert common.choose_device("") == "cpu"
