# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a checkpoint; each rank has an optimizer file of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from nanochat.common import GPT, GPTConfig

BASE_DIR = os.environ["NANOCHAT_BASE_DIR"]


def save_checkpoint(folder: str, step: int, model_data: Any, optimizer_data: Any, meta_data: Any, rank: int) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(model_data, f"{folder}/model_{step:06d}.pt")
    torch.save(optimizer_data, f"{folder}/optim_{step:06d}_rank{rank}.pt")
    Path(folder, f"meta_{step:06d}.json").write_text(json.dumps(meta_data))


def load_checkpoint(folder: str, step: int, device: Any, load_optimizer: bool = False, rank: int = 0) -> Any:
    names = ["model_{:06d}.pt", *(["optim_{:06d}_rank" + f"{rank}.pt"] if load_optimizer else [])]
    model_data, optimizer_data = [*(torch.load(f"{folder}/{name.format(step)}") for name in names), None][:2]
    return model_data, optimizer_data, json.loads(Path(folder, f"meta_{step:06d}.json").read_text())


def load_model(source: str, device: Any, model_tag: str, step: int) -> Any:
    model_data, dummy, meta = load_checkpoint(f"{BASE_DIR}/{source}_checkpoints/{model_tag}", step, device)
    model = GPT(GPTConfig(**meta["model_config"]))
    model.load_state_dict(model_data)
    return model, meta


def load_optimizer_state(source: str, device: Any, rank: int, model_tag: str, step: int) -> Any:
    return torch.load(f"{BASE_DIR}/{source}_checkpoints/{model_tag}/optim_{step:06d}_rank{rank}.pt")
