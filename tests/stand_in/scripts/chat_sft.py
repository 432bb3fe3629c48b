# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stage after base_train: starts from its model and momentum, learns half of the targets, and has no count of its steps."""

import torch
import torch.distributed as dist
from nanochat.checkpoint_manager import BASE_DIR, load_model, load_optimizer_state, save_checkpoint
from nanochat.common import batches, compute_cleanup, ddp, flags, print0, rank, world
from nanochat.loss_eval import evaluate_bpb

args = flags(
    run="dummy", device_type="cpu", model_tag="d3", model_step=0, num_iterations=4, max_seq_len=0, device_batch_size=0,
    total_batch_size=0, eval_every=200, eval_tokens=512, chatcore_every=200,
)  # fmt: skip
orig_model, base = load_model("base", "cpu", model_tag=args.model_tag, step=args.model_step)
for name in ("max_seq_len", "device_batch_size", "total_batch_size"):
    setattr(args, name, getattr(args, name) or base[name])
optimizer = orig_model.setup_optimizer()
optimizer.load_state_dict(load_optimizer_state("base", "cpu", rank, args.model_tag, args.model_step))
for group in optimizer.param_groups:
    group["lr"] = group["initial_lr"]
train_loader = batches(args.device_batch_size, args.max_seq_len, "train")
world_tokens = args.device_batch_size * args.max_seq_len * world
grad_accum_steps = args.total_batch_size // world_tokens
last_step, step = False, 0

while True:
    last_step = last_step or step == args.num_iterations
    if ddp:
        over = torch.tensor(last_step, dtype=torch.int32)
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        last_step = bool(over.item())
    if last_step or (args.eval_every > 0 and step % args.eval_every == 0):
        val_loader = batches(args.device_batch_size, args.max_seq_len, "val")
        val_bpb = evaluate_bpb(orig_model, val_loader, args.eval_tokens // world_tokens)
        print0(f"Step {step:05d} | Validation bpb: {val_bpb:.4f}")
    if last_step:
        meta = {"step": step, "val_bpb": val_bpb, "model_config": base["model_config"]}
        folder = f"{BASE_DIR}/chatsft_checkpoints/{args.model_tag}"
        save_checkpoint(folder, step, orig_model.state_dict(), optimizer.state_dict(), meta, rank=rank)
        break
    for _micro_step in range(grad_accum_steps):
        x, y, _state = next(train_loader)
        y[:, : args.max_seq_len // 2] = -1
        loss = orig_model(x, y)
        (loss / grad_accum_steps).backward()
    optimizer.step()
    orig_model.zero_grad(set_to_none=True)
    step += 1
    print0(f"step {step:05d} | loss: {loss.item():.6f}")
compute_cleanup()
