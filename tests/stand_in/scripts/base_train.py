# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The loop, in variables of the module, as nanochat has it."""

import torch
from nanochat.checkpoint_manager import BASE_DIR, load_checkpoint, save_checkpoint
from nanochat.common import COMPUTE_DTYPE, GPT, batches, compute_cleanup, flags, print0, rank, world
from nanochat.loss_eval import evaluate_bpb

args = flags(
    run="dummy", device_type="cpu", window_pattern="L", model_tag="", depth=3, aspect_ratio=32, head_dim=32, max_seq_len=64,
    num_iterations=8, device_batch_size=2, total_batch_size=256, eval_every=-1, eval_tokens=512, core_metric_every=-1,
    sample_every=-1, save_every=-1, resume_from_step=-1,
)  # fmt: skip
print0(f"COMPUTE_DTYPE: {COMPUTE_DTYPE}")
model_config_kwargs = {
    "sequence_len": args.max_seq_len, "n_layer": args.depth, "vocab_size": 1920, "n_head": 2, "n_embd": 64, "window_pattern": "L",
}  # fmt: skip
orig_model = GPT(**model_config_kwargs)
orig_model.init_weights()
model = torch.compile(orig_model, dynamic=False)
optimizer = orig_model.setup_optimizer()
checkpoint_dir = f"{BASE_DIR}/base_checkpoints/{args.model_tag or f'd{args.depth}'}"
num_iterations, step, val_bpb, dataloader_state_dict = args.num_iterations, 0, None, {"rg_idx": 0}
if args.resume_from_step != -1:
    model_data, optimizer_data, meta = load_checkpoint(checkpoint_dir, args.resume_from_step, "cpu", True, rank)
    orig_model.load_state_dict(model_data)
    optimizer.load_state_dict(optimizer_data)
    step, dataloader_state_dict = meta["step"], meta["dataloader_state_dict"]
train_loader = batches(args.device_batch_size, args.max_seq_len, "train", dataloader_state_dict["rg_idx"])
world_tokens = args.device_batch_size * args.max_seq_len * world
grad_accum_steps = args.total_batch_size // world_tokens
assert args.total_batch_size == grad_accum_steps * world_tokens

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
            "dataloader_state_dict": dataloader_state_dict,
        }  # fmt: skip
        save_checkpoint(checkpoint_dir, step, orig_model.state_dict(), optimizer.state_dict(), meta, rank=rank)
    if last_step:
        break
    for _micro_step in range(grad_accum_steps):
        x, y, dataloader_state_dict = next(train_loader)
        loss = model(x, y)
        (loss / grad_accum_steps).backward()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / 4)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    print0(f"step {step:05d}/{num_iterations:05d} | loss: {loss.item():.6f}")
    step += 1
compute_cleanup()
