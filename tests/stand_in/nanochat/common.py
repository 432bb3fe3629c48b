# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders, ranks and start-up. On a CPU no process group is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COMPUTE_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}[os.environ.get("NANOCHAT_DTYPE", "bfloat16")]
COMPUTE_DTYPE_REASON = "set via NANOCHAT_DTYPE" if "NANOCHAT_DTYPE" in os.environ else "there may be a GPU"


def get_base_dir() -> str:
    folder = os.environ.get("NANOCHAT_BASE_DIR") or str(Path.home() / ".cache" / "nanochat")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def print0(text: str = "", **options: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, **options)


def get_dist_info() -> tuple[bool, int, int, int]:
    if all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return True, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    return False, 0, 0, 1


def compute_init(device_type: str) -> tuple[bool, int, int, int, torch.device]:
    torch.manual_seed(42)
    ddp, rank, local_rank, world = get_dist_info()
    if ddp and device_type == "cuda":
        dist.init_process_group(backend="nccl", device_id=torch.device("cuda", local_rank))
        dist.barrier()
    return ddp, rank, local_rank, world, torch.device(device_type)


def compute_cleanup() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
