# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The C kernels are right, or stay off. Needs a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
import torch
from reference import model_of, tokens, trained
from torch import Tensor
from trainings import flip

from nanochat.model import kernels, native, numerics
from nanochat.model.kernels import Kernel, KernelShape
from nanochat.rules.model_size import ModelConfig

SHAPES = {
    "fp32": KernelShape(64, 32, 96, 3, 32, 515, torch.float32),
    "bf16": KernelShape(66, 33, 80, 2, 40, 1024, torch.bfloat16),
}
CONFIG = ModelConfig(32, 259, 2, 4, 4, 64, "SL")


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    kernels.setup("torch", SHAPES["fp32"])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> native.Library:
    return native.Library(native.built("auto", tmp_path_factory.mktemp("library")))


@pytest.fixture
def all_on(library: native.Library) -> None:
    kernels._library = library
    for kernel in kernels.ALL:
        kernel.on = kernel.right = True


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.usefixtures("all_on")
def test_a_kernel_does_what_its_twin_does(shape: KernelShape) -> None:
    tried = []
    for kernel, args in kernels.trials(shape):
        kernels.prove(kernel, args, kernels.TOLERANCE[shape.dtype])
        assert kernel.right or (kernel.only_narrow and shape.dtype == torch.float32), kernel.name
        tried.append(kernel)
    assert tuple(tried) == kernels.ALL


@pytest.mark.parametrize("matmul", ["fp32", "bf16"])
@pytest.mark.usefixtures("all_on")
def test_a_training_pass_has_the_same_gradients_with_all_kernels(matmul: str) -> None:
    model = model_of(CONFIG)
    batches = [tokens(model, seed=1), tokens(model, seed=2)]
    loss, with_kernels = trained(model, batches, matmul)
    kernels.setup("torch", SHAPES["fp32"])
    plain_loss, plain = trained(model, batches, matmul)
    limit = 5e-5 if matmul == "fp32" else 5e-2
    assert loss == pytest.approx(plain_loss, rel=limit)
    for name, gradient in plain.items():
        assert (with_kernels[name] - gradient).norm() <= limit * gradient.norm() + 1e-7, name


def slow(x: Tensor) -> None:
    for dummy in range(8):
        x.mul_(2)
    x.div_(128)


@pytest.mark.parametrize(
    ("fused", "exact", "reason"),
    [
        (lambda x: x.mul_(2.0002), False, "differs"),
        (lambda x: x.mul_(2.00001), True, "differs"),
        (lambda x: x.fill_(float("nan")), False, "differs"),
        (slow, False, "slower"),
    ],
    ids=["slightly wrong", "inexact", "not-a-number", "slow"],
)
@pytest.mark.usefixtures("all_on")
def test_a_kernel_that_differs_or_is_slower_stays_off(fused: Callable[..., None], exact: bool, reason: str) -> None:
    kernel = Kernel(lambda call, x: fused(x) if call else x.mul_(2), exact)
    assert kernels.prove(kernel, (torch.ones(10**6),), kernels.TOLERANCE[torch.float32]) == reason
    assert not kernel.on


def test_a_host_without_a_compiler_trains_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert kernels.setup("auto", SHAPES["fp32"]).summary() == "none (no C compiler)"
    assert not any(kernel.on for kernel in kernels.ALL)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    assert "ziglang is not installed" in kernels.setup("zig", SHAPES["fp32"]).why


FAULTS = {
    "does not compile": ("#error so", "the build failed with code 1"),
    "crashes": ("void launch(void) { __builtin_trap(); }", "the trial of the library was ended by signal"),
    "hangs": ('void launch(void) { for (;;) __asm__ volatile(""); }', "the trial of the library took longer than 3 s"),
    "lacks a kernel": ("void launch(void) {}", "the trial of the library failed with code 1: AttributeError: "),
}


@pytest.mark.parametrize(("source", "why"), FAULTS.values(), ids=FAULTS)
def test_a_library_with_a_fault_never_gets_its_name(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kernels.c"
    names = "" if "AttributeError" in why else "".join(f"void {name}(void) {{}}\n" for name in native.NAMES)
    file.write_text(names + source)
    monkeypatch.setattr(native, "SOURCE", file)
    monkeypatch.setattr(native, "LIMIT_SECONDS", 3)
    assert why in kernels.setup("auto", SHAPES["fp32"]).why
    assert list((tmp_path / "__pycache__").iterdir()) == []


def test_a_compiler_that_hangs_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIMIT_SECONDS", 1)
    pid = tmp_path / "pid"
    with pytest.raises(native.BuildError, match="the build took longer than 1 s"):
        native.run(["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"], "the build")
    # On a busy machine a killed process dies a moment later, and its new parent may not have reaped it yet.
    state = Path(f"/proc/{pid.read_text().strip()}/stat")

    def over() -> bool:
        try:
            return ") Z " in state.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    ranks.wait_until(over)


def test_a_library_is_built_once_for_each_kind_of_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.built("auto", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(native, "build", None)
        assert native.built("auto", tmp_path) == first
    monkeypatch.setattr(native, "cpu_flags", lambda: ["another"])
    assert native.built("auto", tmp_path) != first


def make_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: path.write_bytes(b""),
        flip,
        lambda path: path.chmod(0o777),
        pytest.param(
            lambda path: os.chown(path, 12345, 12345),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
        make_link,
    ],
    ids=["cut", "empty", "flipped", "writable", "of another user", "link"],
)
def test_a_library_that_changed_is_built_again(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    good = native.built("auto", tmp_path)
    content = good.read_bytes()
    spoil(good)
    assert native.built("auto", tmp_path) == good
    assert good.read_bytes() == content and not good.is_symlink()


def test_a_damaged_library_that_cannot_be_replaced_is_left_off(tmp_path: Path) -> None:
    good = native.built("auto", tmp_path / "kernels")
    good.unlink()
    (good / "in the way").mkdir(parents=True)
    with pytest.raises(native.BuildError, match=r"cannot write .*: Is a directory"):
        native.built("auto", tmp_path / "kernels")
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(native.BuildError, match="other users may change files in"):
        native.built("auto", tmp_path / "kernels")


def test_two_starts_at_once_both_have_a_library(tmp_path: Path) -> None:
    source = "from nanochat.model import native; from pathlib import Path; import sys\n"
    source += "native.Library(native.built('auto', Path(sys.argv[1])))"
    starts = [subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], cwd=ranks.TRAINER) for dummy in range(2)]
    assert [start.wait(ranks.PATIENCE_SECONDS) for start in starts] == [0, 0]
    (library,) = tmp_path.iterdir()
    assert native.is_sound(library)


@pytest.mark.usefixtures("all_on")
def test_a_route_names_the_kernels_and_is_kept() -> None:
    everything = numerics.route()
    assert "norm" in everything.split("+") and "adamw" not in everything.split("+")
    assert numerics.keep(f"{numerics.library()}+norm") and kernels.in_use() == ["norm"]
    assert numerics.keep(everything) and numerics.route() == everything
    kernels.norm.right = False
    assert not numerics.keep(everything)
