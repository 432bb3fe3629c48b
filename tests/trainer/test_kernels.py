# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The C kernels are right, or stay off. Needs a C compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor

from nanochat.model import kernels, native, numerics
from nanochat.model.fused import TrainingPass, kernel_shape
from nanochat.model.gpt import GPT, ModelConfig
from nanochat.model.gradients import unique_ids
from nanochat.model.kernels import Kernel, KernelShape

SHAPES = {
    "fp32": KernelShape(64, 32, 96, 3, 32, 515, torch.float32),
    "bf16": KernelShape(66, 33, 80, 2, 40, 1024, torch.bfloat16),
}
CONFIG = ModelConfig(32, 259, 2, 4, 2, 64, "SL")


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
@pytest.mark.parametrize("kernel", kernels.ALL, ids=lambda kernel: kernel.name)
@pytest.mark.usefixtures("all_on")
def test_a_kernel_does_what_its_twin_does(kernel: Kernel, shape: KernelShape) -> None:
    kernels.prove(kernel, shape)
    assert kernel.right or (kernel.only_narrow and shape.dtype == torch.float32)


@pytest.mark.parametrize("matmul", ["fp32", "bf16"])
@pytest.mark.usefixtures("all_on")
def test_a_training_pass_has_the_same_gradients_with_all_kernels(matmul: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (2, 32), generator=generator)
    targets = torch.randint(-1, CONFIG.vocab_size, (2, 32), generator=generator)

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model = GPT(CONFIG)
        model.init_weights()
        for parameter in model.parameters():
            parameter.detach().add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.02
            )
        training = TrainingPass(model, matmul)
        training.start_step(unique_ids([ids]))
        for dummy in range(2):
            loss = training.forward_backward(ids, targets, 0.01)
        return loss, training.gradients

    loss, with_kernels = gradients()
    kernels.setup("torch", SHAPES["fp32"])
    plain_loss, plain = gradients()
    limit = 2e-5 if matmul == "fp32" else 3e-2
    torch.testing.assert_close(loss, plain_loss, rtol=limit, atol=0)
    for name, gradient in plain.items():
        assert (with_kernels[name] - gradient).norm() <= limit * gradient.norm() + 1e-7, name


def made_up(fused: Any, exact: bool = False) -> Kernel:
    return Kernel("made up", lambda x: x.mul_(2), fused, lambda shape, generator: (torch.ones(10**6),), exact)


def slow(x: Tensor) -> None:
    for dummy in range(8):
        x.mul_(2)
    x.div_(128)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (made_up(lambda x: x.mul_(2.1)), "differs"),
        (made_up(slow), "slower"),
        (made_up(lambda x: x.mul_(2.00001), True), "differs"),
        (made_up(lambda x: x.fill_(float("nan"))), "differs"),
    ],
    ids=["wrong", "slow", "inexact", "not-a-number"],
)
def test_a_kernel_that_differs_or_is_slower_stays_off(kernel: Kernel, reason: str) -> None:
    assert kernels.prove(kernel, SHAPES["fp32"]) == reason
    assert not kernel.on


def test_a_host_without_a_compiler_trains_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert kernels.setup("auto", SHAPES["fp32"]).summary() == "none (no C compiler)"
    assert not any(kernel.on for kernel in kernels.ALL)


def test_zig_needs_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    assert "ziglang is not installed" in kernels.setup("zig", SHAPES["fp32"]).why


FAULTS = {
    "does not compile": ("#error so", "the build failed with code 1"),
    "crashes": ("void launch(void) { __builtin_trap(); }", "the trial of the library was ended by signal"),
    "hangs": ('void launch(void) { for (;;) __asm__ volatile(""); }', "the trial of the library took longer than 3 s"),
    "lacks a kernel": ("void launch(void) {}", "the trial of the library failed"),
}


@pytest.mark.parametrize(("source", "why"), FAULTS.values(), ids=FAULTS)
def test_a_library_with_a_fault_never_gets_its_name(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kernels.c"
    names = "" if why.endswith("failed") else "".join(f"void {name}(void) {{}}\n" for name in native.NAMES)
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


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.built("auto", tmp_path)
    monkeypatch.setattr(native, "build", None)
    assert native.built("auto", tmp_path) == first


@pytest.mark.usefixtures("all_on")
def test_a_route_names_the_kernels_and_is_kept() -> None:
    everything = numerics.route()
    assert "norm" in everything.split("+") and "adamw" not in everything.split("+")
    assert numerics.keep(f"{numerics.library()}+norm") and kernels.in_use() == ["norm"]
    assert numerics.keep(everything) and numerics.route() == everything
    kernels.norm.right = False
    assert not numerics.keep(everything)


def test_a_large_batch_is_tried_with_few_rows() -> None:
    assert kernel_shape(ModelConfig(512, n_embd=96), 32, "fp32")[:3] == (2048, 512, 96)
    assert kernel_shape(ModelConfig(4096, n_embd=96), 2, "fp32")[:3] == (2048, 2048, 96)
    assert kernel_shape(ModelConfig(512, n_embd=96), 1, "fp32")[:3] == (512, 512, 96)
