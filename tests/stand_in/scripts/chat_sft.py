# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stage after base_train: starts from its model and momentum, learns some of the targets, and meets its end unannounced."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from nanochat.checkpoint_manager import load_model, load_optimizer_state, save_checkpoint
from nanochat.common import compute_cleanup, compute_init, get_base_dir, print0
from nanochat.dataloader import batches
from nanochat.loss_eval import evaluate_bpb

parser = argparse.ArgumentParser()
parser.add_argument("--run", default="dummy")
parser.add_argument("--device-type", default="cpu")
parser.add_argument("--model-tag", default=None)
for name, default in {
    "model-step": None, "load-optimizer": 1, "num-iterations": 4, "max-seq-len": None, "device-batch-size": None,
    "total-batch-size": None, "eval-every": 200, "eval-tokens": 512, "chatcore-every": 200,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
user_config = vars(args).copy()

ddp, ddp_rank, ddp_local_rank, ddp_world_size, device = compute_init(args.device_type)
model, tokenizer, meta = load_model("base", device, phase="train", model_tag=args.model_tag, step=args.model_step)
for name in ("max_seq_len", "device_batch_size", "total_batch_size"):
    setattr(args, name, getattr(args, name) or meta[name])
orig_model = model
model = torch.compile(model, dynamic=False)
world_tokens = args.device_batch_size * args.max_seq_len * ddp_world_size
assert args.total_batch_size % world_tokens == 0
grad_accum_steps = args.total_batch_size // world_tokens
optimizer = model.setup_optimizer()
if args.load_optimizer:
    optimizer_data = load_optimizer_state("base", device, rank=ddp_rank, model_tag=args.model_tag, step=args.model_step)
    if optimizer_data is None:
        print0("WARNING: optimizer checkpoint not found, starting with fresh optimizer")
    else:
        base_lrs = [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(optimizer_data)
        for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = group["initial_lr"] = base_lr
        print0("Loaded optimizer state from pretrained checkpoint")

last_step, step, val_bpb = False, 0, None


def conversations():
    """Rows whose second half is learnt."""
    global last_step
    for number, (x, y, _state) in enumerate(batches(args.device_batch_size, args.max_seq_len, "train", None), start=1):
        last_step = last_step or 0 < args.num_iterations * grad_accum_steps < number
        y[:, : args.max_seq_len // 2] = -1
        yield x, y


train_loader = conversations()
x, y = next(train_loader)
while True:
    if ddp:
        last_step_tensor = torch.tensor(last_step, dtype=torch.int32, device=device)
        dist.all_reduce(last_step_tensor, op=dist.ReduceOp.MAX)
        last_step = bool(last_step_tensor.item())
    if last_step or (args.eval_every > 0 and step % args.eval_every == 0):
        val_loader = batches(args.device_batch_size, args.max_seq_len, "val", None)
        val_bpb = evaluate_bpb(model, val_loader, args.eval_tokens // world_tokens, None)
        print0(f"Step {step:05d} | Validation bpb: {val_bpb:.4f}")
    if last_step:
        checkpoint_dir = f"{get_base_dir()}/chatsft_checkpoints/{args.model_tag or 'd3'}"
        saved = {"step": step, "val_bpb": val_bpb, "model_config": meta["model_config"], "user_config": user_config}
        save_checkpoint(checkpoint_dir, step, orig_model.state_dict(), optimizer.state_dict(), saved, rank=ddp_rank)
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
