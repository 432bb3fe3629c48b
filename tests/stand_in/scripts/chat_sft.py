# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stage after base_train: starts from its model and momentum, learns some of the targets, and meets its end unannounced."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from nanochat.checkpoint_manager import BASE_DIR, load_model, load_optimizer_state, save_checkpoint
from nanochat.common import batches, compute_cleanup, ddp, print0, rank, world
from nanochat.loss_eval import evaluate_bpb

parser = argparse.ArgumentParser()
for name, text in {"run": "dummy", "device-type": "cpu", "model-tag": "d3"}.items():
    parser.add_argument(f"--{name}", default=text)
for name, default in {
    "model-step": None, "num-iterations": 4, "max-seq-len": None, "device-batch-size": None, "total-batch-size": None,
    "eval-every": 200, "eval-tokens": 512, "chatcore-every": 200,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
orig_model, base = load_model("base", "cpu", model_tag=args.model_tag, step=args.model_step)
for name in ("max_seq_len", "device_batch_size", "total_batch_size"):
    setattr(args, name, getattr(args, name) or base[name])
model = torch.compile(orig_model, dynamic=False)
optimizer = orig_model.setup_optimizer()
rates = [group["lr"] for group in optimizer.param_groups]
optimizer.load_state_dict(load_optimizer_state("base", "cpu", rank, args.model_tag, args.model_step))
for group, rate in zip(optimizer.param_groups, rates, strict=True):
    group["lr"] = group["initial_lr"] = rate
world_tokens = args.device_batch_size * args.max_seq_len * world
grad_accum_steps = args.total_batch_size // world_tokens
last_step, step = False, 0


def conversations():
    """Rows whose second half is learnt."""
    global last_step
    for number, (x, y, _state) in enumerate(batches(args.device_batch_size, args.max_seq_len, "train"), start=1):
        last_step = last_step or 0 < args.num_iterations * grad_accum_steps < number
        y[:, : args.max_seq_len // 2] = -1
        yield x, y


train_loader = conversations()
x, y = next(train_loader)
while True:
    if ddp:
        over = torch.tensor(last_step, dtype=torch.int32)
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        last_step = bool(over.item())
    if last_step or (args.eval_every > 0 and step % args.eval_every == 0):
        val_loader = batches(args.device_batch_size, args.max_seq_len, "val")
        val_bpb = evaluate_bpb(model, val_loader, args.eval_tokens // world_tokens)
        print0(f"Step {step:05d} | Validation bpb: {val_bpb:.4f}")
    if last_step:
        meta = {"step": step, "val_bpb": val_bpb, "model_config": base["model_config"]}
        folder = f"{BASE_DIR}/chatsft_checkpoints/{args.model_tag}"
        save_checkpoint(folder, step, orig_model.state_dict(), optimizer.state_dict(), meta, rank=rank)
        break
    for _micro_step in range(grad_accum_steps):
        loss = model(x, y)
        (loss / grad_accum_steps).backward()
        x, y = next(train_loader)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    step += 1
    print0(f"step {step:05d} | loss: {loss.item():.6f}")
compute_cleanup()
