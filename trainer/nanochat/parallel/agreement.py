# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks that all ranks have the same settings, data and code before the first step, and the same weights from then on.

A difference is an error that names it: which key with which value on which rank, or which tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.parallel.comm import Comm
from nanochat.rules.causes import Cause

MISSING = "nothing"
# Causes of differences, by the first word of the fact.
DIFFERENCES = {
    "shard": Cause.DATA_DIFFER,
    "tokenizer": Cause.DATA_DIFFER,
    "conversations": Cause.DATA_DIFFER,
    "torch": Cause.TORCH_DIFFERS,
    "code": Cause.CODE_DIFFERS,
}


def code_digest() -> str:
    """A digest of this package's source files, without the scripts that only call it."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")]):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def agree(comm: Comm, facts: Mapping[str, object]) -> None:
    """Fail unless every rank has the same facts."""
    mine = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    answers = comm.exchange("the comparison of settings", [comm.host, mine])
    keys = list(dict.fromkeys(key for dummy, theirs in answers for key in theirs))
    differing = [key for key in keys if len({theirs.get(key, MISSING) for dummy, theirs in answers}) > 1]
    if not differing:
        return
    found = [theirs.get(differing[0], MISSING) for dummy, theirs in answers]
    hosts = enumerate(zip(answers, found, strict=True))
    values = ", ".join(f"rank {rank} ({host}) has {one or 'an empty value'}" for rank, ((host, dummy), one) in hosts)
    more = f" (and {len(differing) - 1} more: {', '.join(differing[1:4])})" if differing[1:] else ""
    said = f"the ranks differ in {differing[0]}: {values}{more}; start all ranks with the same settings."
    cause = DIFFERENCES.get(differing[0].partition(" ")[0], Cause.SETTINGS_DIFFER)
    raise UserError(said, cause, minority(found))


def minority(values: Sequence[str]) -> list[int]:
    """The ranks that differ from the majority; none without a majority."""
    most = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != most] if 2 * values.count(most) > len(values) else []


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each tensor's bytes."""
    plain = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in tensors.items()}
    return {name: hashlib.sha256(each.numpy().data).hexdigest()[:16] for name, each in plain.items()}


def start_alike(comm: Comm, tensors: Mapping[str, Tensor]) -> list[str]:
    """Give every rank rank 0's tensors; only differing ones are sent. Returns their names."""
    if comm.world == 1:
        return []
    answers = comm.exchange("the first weights", digests(tensors), patient=True)
    differing = [name for name in tensors if len({one[name] for one in answers}) > 1]
    for name in differing:
        comm.broadcast(tensors[name].detach(), 0, f"the first weights of {name}")
    return differing


def compare_weights(comm: Comm, tensors: Mapping[str, Tensor], when: str) -> tuple[str, UserError | None]:
    """The digest of this rank's tensors, and the error if the ranks have diverged."""
    mine = digests(tensors)
    whole = hashlib.sha256(json.dumps(mine).encode()).hexdigest()[:16]
    answers = comm.exchange(f"the comparison of weights {when}", mine, patient=True)
    for name in tensors:
        values = [one[name] for one in answers]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            return whole, UserError(
                f"the ranks hold different weights {when}; the first tensor that differs is {name} ({listed}); "
                "resume from the last checkpoint, and suspect memory or CPU of the rank that differs.",
                Cause.WEIGHTS_DIFFER,
                minority(values),
            )
    return whole, None
