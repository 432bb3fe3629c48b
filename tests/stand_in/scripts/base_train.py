# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The loop, in variables of the module, as nanochat has it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from nanochat.checkpoint_manager import BASE_DIR, load_checkpoint, save_checkpoint
from nanochat.common import COMPUTE_DTYPE, GPT, GPTConfig, batches, compute_cleanup, print0, rank, world
from nanochat.loss_eval import evaluate_bpb

parser = argparse.ArgumentParser()
for name, text in {"run": "dummy", "device-type": "cpu", "window-pattern": "L", "model-tag": None}.items():
    parser.add_argument(f"--{name}", default=text)
for name, default in {
    "depth": 3, "aspect-ratio": 32, "head-dim": 32, "max-seq-len": 64, "num-iterations": 8, "device-batch-size": 2,
    "total-batch-size": 256, "eval-every": -1, "eval-tokens": 512, "core-metric-every": -1, "sample-every": -1, "save-every": -1,
    "resume-from-step": -1,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
print0(f"COMPUTE_DTYPE: {COMPUTE_DTYPE}")
model_config_kwargs = asdict(GPTConfig(args.max_seq_len, args.depth))
orig_model = GPT(GPTConfig(**model_config_kwargs))
orig_model.init_weights()
model = torch.compile(orig_model, dynamic=False)
optimizer = orig_model.setup_optimizer()
checkpoint_dir = f"{BASE_DIR}/base_checkpoints/{args.model_tag or f'd{args.depth}'}"
step, batch, val_bpb = 0, 0, None
if args.resume_from_step != -1:
    loaded = load_checkpoint(checkpoint_dir, args.resume_from_step, "cpu", load_optimizer=True, rank=rank)
    orig_model.load_state_dict(loaded[0])
    optimizer.load_state_dict(loaded[1])
    step, batch = loaded[2]["step"], loaded[2]["dataloader_state_dict"]["rg_idx"]
train_loader = batches(args.device_batch_size, args.max_seq_len, "train", batch)
x, y, dataloader_state_dict = next(train_loader)
num_iterations, world_tokens = args.num_iterations, args.device_batch_size * args.max_seq_len * world
assert args.total_batch_size % world_tokens == 0
grad_accum_steps = args.total_batch_size // world_tokens

while True:
    last_step = step == num_iterations
    if args.eval_every > 0 and (last_step or step % args.eval_every == 0):
        val_loader = batches(args.device_batch_size, args.max_seq_len, "val")
        val_bpb = evaluate_bpb(model, val_loader, args.eval_tokens // world_tokens)
        print0(f"Step {step:05d} | Validation bpb: {val_bpb:.6f}")
    if last_step or (args.save_every > 0 and step % args.save_every == 0 and step not in (0, args.resume_from_step)):
        meta = {
            "step": step, "val_bpb": val_bpb, "model_config": model_config_kwargs, "device_batch_size": args.device_batch_size,
            "max_seq_len": args.max_seq_len, "total_batch_size": args.total_batch_size,
            "dataloader_state_dict": {**dataloader_state_dict, "rg_idx": batch},
            "loop_state": {"min_val_bpb": val_bpb, "smooth_train_loss": 0.0, "total_training_time": 0.0},
        }  # fmt: skip
        save_checkpoint(checkpoint_dir, step, orig_model.state_dict(), optimizer.state_dict(), meta, rank=rank)
    if last_step:
        break
    for _micro_step in range(grad_accum_steps):
        loss = model(x, y)
        (loss / grad_accum_steps).backward()
        batch = dataloader_state_dict["rg_idx"]
        x, y, dataloader_state_dict = next(train_loader)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / 4)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    print0(f"step {step:05d}/{num_iterations:05d} | loss: {loss.item():.6f}")
    step += 1
compute_cleanup()
