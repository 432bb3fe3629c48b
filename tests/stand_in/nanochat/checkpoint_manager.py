# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a checkpoint; each rank has an optimizer file of its own."""

import json
import os
from pathlib import Path

import torch

from nanochat.common import GPT

BASE_DIR = os.environ["NANOCHAT_BASE_DIR"]


def save_checkpoint(folder, step, model_data, optimizer_data, meta_data, rank):
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(model_data, f"{folder}/model_{step:06d}.pt")
    torch.save(optimizer_data, f"{folder}/optim_{step:06d}_rank{rank}.pt")
    Path(folder, f"meta_{step:06d}.json").write_text(json.dumps(meta_data))


def load_checkpoint(folder, step, device, load_optimizer=False, rank=0):
    optimizer_data = torch.load(f"{folder}/optim_{step:06d}_rank{rank}.pt") if load_optimizer else None
    meta_data = json.loads(Path(folder, f"meta_{step:06d}.json").read_text())
    return torch.load(f"{folder}/model_{step:06d}.pt"), optimizer_data, meta_data


def load_model(source, device, model_tag, step):
    model_data, dummy, meta = load_checkpoint(f"{BASE_DIR}/{source}_checkpoints/{model_tag}", step, device)
    model = GPT(**meta["model_config"])
    model.load_state_dict(model_data)
    return model, meta


def load_optimizer_state(source, device, rank, model_tag, step):
    return load_checkpoint(f"{BASE_DIR}/{source}_checkpoints/{model_tag}", step, device, True, rank)[1]
