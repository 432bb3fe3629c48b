# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The loop, in variables of the module, as nanochat has it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
from nanochat.checkpoint_manager import load_checkpoint, save_checkpoint
from nanochat.common import COMPUTE_DTYPE, COMPUTE_DTYPE_REASON, compute_cleanup, compute_init, get_base_dir, print0
from nanochat.dataloader import batches
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss_eval import evaluate_bpb, evaluate_task

parser = argparse.ArgumentParser()
parser.add_argument("--run", default="dummy")
parser.add_argument("--device-type", default="cpu")
parser.add_argument("--window-pattern", default="L")
parser.add_argument("--model-tag", default=None)
for name, default in {
    "depth": 3, "aspect-ratio": 32, "head-dim": 32, "max-seq-len": 64, "num-iterations": 8, "device-batch-size": 2,
    "total-batch-size": 256, "eval-every": -1, "eval-tokens": 512, "core-metric-every": -1, "core-seconds": 0, "sample-every": -1,
    "save-every": -1, "resume-from-step": -1,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
user_config = vars(args).copy()

ddp, ddp_rank, ddp_local_rank, ddp_world_size, device = compute_init(args.device_type)
print0(f"COMPUTE_DTYPE: {COMPUTE_DTYPE} ({COMPUTE_DTYPE_REASON})")
model_config_kwargs = asdict(GPTConfig(sequence_len=args.max_seq_len, n_layer=args.depth))
model = GPT(GPTConfig(**model_config_kwargs))
model.init_weights()
checkpoint_dir = f"{get_base_dir()}/base_checkpoints/{args.model_tag or f'd{args.depth}'}"
resuming = args.resume_from_step != -1
if resuming:
    model_data, optimizer_data, meta_data = load_checkpoint(
        checkpoint_dir, args.resume_from_step, device, load_optimizer=True, rank=ddp_rank
    )
    model.load_state_dict(model_data, strict=True, assign=True)
orig_model = model
model = torch.compile(model, dynamic=False)
optimizer = orig_model.setup_optimizer()
if resuming:
    optimizer.load_state_dict(optimizer_data)

state = meta_data["dataloader_state_dict"] if resuming else None
train_loader = batches(args.device_batch_size, args.max_seq_len, "train", state)
x, y, dataloader_state_dict = next(train_loader)
num_iterations, total_batch_size = args.num_iterations, args.total_batch_size
batch, step, val_bpb = 0, (meta_data["step"] if resuming else 0), None
world_tokens = args.device_batch_size * args.max_seq_len * ddp_world_size
assert total_batch_size % world_tokens == 0
grad_accum_steps = total_batch_size // world_tokens

while True:
    last_step = step == num_iterations
    if args.eval_every > 0 and (last_step or step % args.eval_every == 0):
        model.eval()
        val_loader = batches(args.device_batch_size, args.max_seq_len, "val", None)
        val_bpb = evaluate_bpb(model, val_loader, args.eval_tokens // world_tokens, None)
        print0(f"Step {step:05d} | Validation bpb: {val_bpb:.6f}")
        model.train()
    if args.core_metric_every > 0 and (last_step or (step > 0 and step % args.core_metric_every == 0)):
        print0(f"Step {step:05d} | CORE metric: {evaluate_task(10, args.core_seconds):.4f}")
    saves = args.save_every > 0 and step % args.save_every == 0 and step not in (0, args.resume_from_step)
    if last_step or saves:
        meta = {
            "step": step, "val_bpb": val_bpb, "model_config": model_config_kwargs, "user_config": user_config,
            "device_batch_size": args.device_batch_size, "max_seq_len": args.max_seq_len,
            "total_batch_size": total_batch_size, "dataloader_state_dict": {**dataloader_state_dict, "rg_idx": batch},
            "loop_state": {"min_val_bpb": val_bpb, "smooth_train_loss": 0.0, "total_training_time": 0.0},
        }  # fmt: skip
        save_checkpoint(checkpoint_dir, step, orig_model.state_dict(), optimizer.state_dict(), meta, rank=ddp_rank)
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
