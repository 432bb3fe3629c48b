# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Helpers shared by several measurements; importing this file loads nothing but the standard library."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ansible/collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import parse_events  # noqa: E402
from ansible_collections.nanochat.ddp.tests.integration import local  # noqa: E402

TRAINER = ROOT / "trainer"
VOCABULARY = 4096
free_port = local.free_port


def prepare(folder: Path) -> None:
    """Make shards and tokenizer from Python's own library."""
    library = sysconfig.get_paths()["stdlib"]
    run_module(
        folder, "make_shards", "--from", library, "--out", str(folder / "data"), "--shards", "3", "--suffix", ".py"
    )
    run_module(folder, "tok_train", "--vocab-size", str(VOCABULARY))


def run_module(folder: Path, script: str, *argv: str) -> None:
    words = [sys.executable, "-m", f"scripts.{script}", *argv]
    subprocess.run(words, cwd=TRAINER, env=environment(folder), check=True, stdout=sys.stderr)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a rank of one thread on this machine."""
    paths = {"NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_DATA_DIR": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def train_step(sync: Any, rows: Any, schedule: Any) -> None:
    """One step of a rank as in scripts.base_train, over these rows by pass."""
    from torch import as_tensor

    ids, targets = rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
    sync.offer_ids(list(ids))
    token_ids = sync.take_ids()[0]
    sync.optimizer.prepare(token_ids)
    sync.training.start_step(token_ids)
    sync.start_step(token_ids)
    loss, last, scale = 0.0, len(ids) - 1, 1 / (ids.numel() * sync.comm.world)
    for number in range(len(ids)):
        on_ready = sync.on_ready if number == last else None
        loss += sync.training.forward_backward(ids[number], targets[number], scale, on_ready)
    sync.step(as_tensor(loss), schedule)


def events(path: Path, kind: str = "") -> list[dict[str, Any]]:
    """The events of a kind, or all, in a metrics file, skipping incomplete lines: a power cut tears one, and the next joins it."""
    found = parse_events(path.read_bytes()) if path.exists() else []
    return [event for event in found if kind in ("", event["kind"])]
