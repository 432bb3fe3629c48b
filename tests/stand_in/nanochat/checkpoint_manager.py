# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints, written in place and on the first rank's disk; each rank writes its part of the optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nanochat.common import get_base_dir
from nanochat.gpt import GPT, GPTConfig


def save_checkpoint(
    checkpoint_dir: str, step: int, model_data: Any, optimizer_data: Any, meta_data: Any, rank: int = 0
) -> None:
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        torch.save(model_data, folder / f"model_{step:06d}.pt")
        (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta_data, indent=2))
    if optimizer_data is not None:
        torch.save(optimizer_data, folder / f"optim_{step:06d}_rank{rank}.pt")


def load_checkpoint(
    checkpoint_dir: str, step: int, device: Any, load_optimizer: bool = False, rank: int = 0
) -> tuple[Any, Any, Any]:
    folder, optimizer_data = Path(checkpoint_dir), None
    model_data = torch.load(folder / f"model_{step:06d}.pt", map_location=device)
    if load_optimizer:
        optimizer_data = torch.load(folder / f"optim_{step:06d}_rank{rank}.pt", map_location=device)
    return model_data, optimizer_data, json.loads((folder / f"meta_{step:06d}.json").read_text())


def folder_of(source: str, model_tag: str | None) -> Path:
    return Path(get_base_dir()) / f"{source}_checkpoints" / (model_tag or "d3")


def last_step(folder: Path) -> int:
    return max(int(path.stem.split("_")[1]) for path in folder.glob("model_*.pt"))


def load_model(source: str, device: Any, phase: str, model_tag: str | None = None, step: int | None = None) -> Any:
    folder = folder_of(source, model_tag)
    model_data, _optimizer_data, meta = load_checkpoint(str(folder), step or last_step(folder), device)
    model = GPT(GPTConfig(**meta["model_config"]))
    model.load_state_dict(model_data, strict=True, assign=True)
    model.train(phase == "train")
    return model, None, meta


def load_optimizer_state(
    source: str, device: Any, rank: int, model_tag: str | None = None, step: int | None = None
) -> Any:
    folder = folder_of(source, model_tag)
    path = folder / f"optim_{step or last_step(folder):06d}_rank{rank}.pt"
    return torch.load(path, map_location=device) if path.exists() else None
