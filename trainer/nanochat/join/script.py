# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A running checkout script: its variables, and the wrappers around its optimizer, evaluation and checkpoints.

nanochat's scripts keep their loop's state in module variables (step, num_iterations, args, orig_model, ...), which we read.
"""

from __future__ import annotations

import functools
import importlib
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.join.optimizer import FILES_KEY, JoinedOptimizer, World
from nanochat.kit.common import UserError
from nanochat.parallel.agreement import check_identical, start_alike
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run.lineage import META_KEY
from nanochat.run.loop import due
from nanochat.run.optim_file import OptimizerLayout
from nanochat.run.resume import folder_leader
from nanochat.run.saving import write
from nanochat.run.state import TrainingProgress

LEFT_OUT_AT_A_STOP = ("eval_every", "core_metric_every", "sample_every", "chatcore_every")


class Script:
    """The script of one rank."""

    def __init__(self, world: World, journal: Journal, sync: str, keep: int) -> None:
        self.world, self.comm, self.journal, self.sync, self.keep = world, world.comm, journal, sync, keep
        self.progress = TrainingProgress()  # of this process: its steps and smoothed loss
        self.stop_asked, self.stopping = False, False
        self.resumed_from: int | None = None
        self.saved: list[int] = []
        self.training = ""  # its id
        # The checkpoint of another run that it continues: folder and step.
        self.base: tuple[Path, int] | None = None
        self.losses: list[Tensor] = []
        self.begun = time.perf_counter()

    # -- its variables

    @property
    def variables(self) -> dict[str, Any]:
        return vars(sys.modules["__main__"])

    def number(self, name: str) -> int:
        """A number of its loop: the variable of this name, or else the flag; 0 if there is none or it is not positive."""
        return max(0, int(self.variables.get(name, getattr(self.variables["args"], name, None)) or 0))

    @property
    def step(self) -> int:
        step = self.variables.get("step")
        if not isinstance(step, int) or not {"args", "orig_model"} <= self.variables.keys():
            raise UserError(
                "this script has no variables args, step and orig_model as nanochat's base_train and chat_sft have them, so its ranks "
                "cannot be joined; use those, or ddp_trainer_source=ours."
            )
        return step

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.variables["orig_model"].named_parameters()}

    # -- wrappers

    def install(self) -> None:
        """Before the script starts: wrap torch itself."""
        script, make = self, torch.optim.Optimizer.__init__
        backward: Callable[..., None] = Tensor.backward

        def made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            make(optimizer, *arguments, **options)
            script.join(optimizer)

        def backward_and_note_loss(loss: Tensor, *arguments: Any, **options: Any) -> None:
            script.losses.append(loss.detach())
            backward(loss, *arguments, **options)

        torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]
        Tensor.backward = backward_and_note_loss  # type: ignore[method-assign, assignment]
        # A minute of compiling before the first step gains little on a CPU, and compiled passes bypass hooks.
        torch.compile = lambda model=None, *dummy, **options: model if model is not None else (lambda one: one)  # type: ignore[assignment]

    def wrap(self) -> None:
        """Replace the checkout's functions that save, load and evaluate, before its scripts import them."""
        manager: Any = importlib.import_module("nanochat.checkpoint_manager")
        evaluation: Any = importlib.import_module("nanochat.loss_eval")
        manager.save_checkpoint = self.save
        manager.load_checkpoint = functools.partial(self.load, manager.load_checkpoint)
        manager.load_optimizer_state = functools.partial(self.load_state, manager.load_optimizer_state)
        evaluation.evaluate_bpb = functools.partial(self.evaluate, evaluation.evaluate_bpb)

    def join(self, optimizer: Any) -> None:
        """Make the script's optimizer train together with the other ranks'."""
        joined = JoinedOptimizer(optimizer, self.world, self.sync)
        optimizer.step = lambda *dummy: self.train_step(joined)
        optimizer.state_dict, optimizer.load_state_dict = joined.state_dict, joined.load_state_dict
        parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        start_alike(self.comm, {str(n): p for n, p in enumerate(parameters)})

    # -- a step

    def train_step(self, optimizer: JoinedOptimizer) -> None:
        """One optimizer step over all ranks."""
        comm, step = self.comm, self.step
        passed = time.perf_counter() - self.begun
        if not self.progress.step:
            self._first_step()
        if due(step, self.number("sample_every")):
            # One rank alone may have written samples for long.
            comm.barrier("the beginning of the step")
        comm.enter("sync", step)
        pack = torch.tensor([float(torch.stack(self.losses).sum()), float(self.stop_asked)])
        self.losses.clear()
        tables = [one.weight for one in self.variables["orig_model"].modules() if isinstance(one, torch.nn.Embedding)]
        total = optimizer.step(pack, tables).tolist()
        if not math.isfinite(total[0]):
            raise not_finite(f"the loss is {total[0]} at step {step}, so this step's weights are unusable")
        self._record(optimizer, total[0] / comm.world, passed)
        self.progress.step += 1
        if self.progress.step == 1:
            self._prove(step + 1, f"after step {step + 1}")
        if total[1] and not self.stopping:
            self._end_soon(step)
        self._go_on(step + 1)

    def _first_step(self) -> None:
        # 0: unknown.
        steps = self.journal.heartbeat.steps = self.number("num_iterations")
        attempt = self.comm.exchange("the name of this attempt", secrets.token_hex(8), patient=True)[0]
        self.journal.open_tracker(self.resumed_from is not None)
        self.journal.record(
            "start", self.step, rank=self.comm.rank, world=self.comm.world, run=self.journal.settings.run,
            model={"config": self.variables.get("model_config_kwargs") or {},
                   "parameters": {"total": sum(p.numel() for p in self.weights.values())},
                   "flops_per_token": self.variables.get("num_flops_per_token")},
            settings=vars(self.variables["args"]), capability=torch.backends.cpu.get_cpu_capability(), steps=steps,
            total_batch_size=self.number("total_batch_size"), resumed_from=self.resumed_from, attempt_id=attempt, training=self.training,
            notices=self.journal.notices,
        )  # fmt: skip

    def _record(self, optimizer: JoinedOptimizer, loss: float, passed: float) -> None:
        seconds = time.perf_counter() - self.begun
        smooth = self.progress.add_loss(loss)
        group = optimizer.optimizer.param_groups[0]
        place = self.variables.get("dataloader_state_dict") or {}
        wait, sent = self.comm.take_counters()
        self.journal.record(
            "step", self.step, loss=loss, loss_smooth=smooth, seconds=seconds, tokens_per_second=self.number("total_batch_size") / seconds,
            forward_backward_seconds=passed, wait_seconds=wait, optimizer_seconds=max(0.0, seconds - passed - wait),
            data_seconds=0.0, bytes_sent=sent, lr_multiplier=group["lr"] / (group.get("initial_lr") or group["lr"] or 1.0),
            epoch=place.get("epoch"),
        )  # fmt: skip

    def _prove(self, step: int, when: str) -> None:
        """Compare all ranks' weights."""
        digest = check_identical(self.comm, self.weights, when)
        self.journal.record("digest", step, digest=digest, identical=True)

    # -- stopping early

    def _end_soon(self, step: int) -> None:
        """Make the loop believe that all steps are done: it saves and ends by itself."""
        self.stopping = True
        variables, flags = self.variables, self.variables["args"]
        for name in LEFT_OUT_AT_A_STOP:
            setattr(flags, name, -1)
        self.journal.say(f"Stopping after step {step}, saving a checkpoint")
        if "num_iterations" in variables:
            variables["num_iterations"] = step + 1
        else:
            variables["last_step"] = True
            # chat_sft evaluates before it saves, whatever was asked for: reduce it to one batch.
            flags.eval_tokens = flags.device_batch_size * flags.max_seq_len * self.comm.world

    # -- evaluation and checkpoints

    def evaluate(self, original: Callable[..., float], *arguments: Any, **options: Any) -> float:
        """The checkout's evaluation, with its result recorded."""
        self.comm.enter("eval", self.step)
        begun = time.perf_counter()
        result = original(*arguments, **options)
        if self.comm.rank == 0:
            self.journal.record("eval", self.step, val_bpb=float(result), seconds=time.perf_counter() - begun)
        self._go_on(self.step)
        return result

    def save(self, checkpoint_dir: str, step: int, model_data: Mapping[str, Tensor], optimizer_data: Any,
             meta_data: Mapping[str, Any], rank: int = 0) -> None:  # fmt: skip
        """In place of the checkout's save_checkpoint: atomic and on every host; older ones than the newest few are removed."""
        comm, folder = self.comm, Path(checkpoint_dir)
        comm.enter("save", step)
        self._prove(step, f"at step {step}")
        if not all(bool(weights.isfinite().all()) for weights in self.weights.values()):
            raise not_finite(f"the weights are not finite at step {step}, so they are not saved")
        contents: dict[str, Any] = {"optimizer": dict(optimizer_data or {})}
        if comm.rank == folder_leader(comm, folder):
            contents |= {"model": dict(model_data), "meta": {**meta_data, META_KEY: self.training}}
        if error := write(comm, self.journal, folder, step, contents):
            raise error
        self.saved.append(step)
        checkpoints.prune(folder, self.keep, self.saved)
        self.journal.say(f"Saved checkpoint of step {step} to {folder}")
        self._go_on(step)

    def _go_on(self, step: int) -> None:
        self.comm.enter("forward_backward", step)
        self.begun = time.perf_counter()

    def load(self, original: Callable[..., Any], checkpoint_dir: str, step: int, device: Any,
             load_optimizer: bool = False, rank: int = 0) -> Any:  # fmt: skip
        """The checkout's load_checkpoint, with all ranks' optimizer files."""
        model_data, dummy, meta = original(checkpoint_dir, step, device)
        if not load_optimizer:
            return model_data, None, meta
        files = optimizer_files(Path(checkpoint_dir), step)
        if not files:
            raise UserError(f"the checkpoint of step {step} in {checkpoint_dir} has no optim_{step:06d}_rank*.pt.")
        return model_data, {FILES_KEY: files}, meta

    def load_state(self, original: Callable[..., Any], source: str, *arguments: Any, **options: Any) -> Any:
        """The checkout's load_optimizer_state, from any number of ranks; None if the checkpoint has none."""
        if self.base is None or source != "base":
            return original(source, *arguments, **options)
        files = optimizer_files(*self.base)
        return {FILES_KEY: files} if files else None


def not_finite(what: str) -> UserError:
    return UserError(
        f"{what}; resume from the last checkpoint with lower learning rates or float32.", Cause.NON_FINITE_LOSS
    )


def optimizer_files(folder: Path, step: int) -> dict[int, Any]:
    """The optimizer files of a checkpoint: any rank's file of ours, or all ranks' by rank."""
    files = {}
    for rank in checkpoints.optimizer_ranks(folder, step):
        files[rank] = checkpoints.load_optimizer(folder, step, rank)[0]
        if OptimizerLayout.is_complete(files[rank]):
            return {rank: files[rank]}
    return files
