# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything the doctor has seen, in a file that can be shared."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Sequence

from .._contract.plan import Plan
from .case import answer_of

# Variables that the plan sets; all others may be secrets.
OPEN_NAMES = re.compile(r"(NANOCHAT|OMP|GLOO|NCCL|PYTHON|TORCH)[A-Z_]*|CUDA_VISIBLE_DEVICES|GLIBC_TUNABLES")
MASK = "***"


def bundle(
    plan: Plan, results: Mapping[str, Any], secrets: Sequence[Mapping[str, Any]], told: Mapping[str, Any]
) -> Dict[str, object]:
    """The verdict, the plan and all evidence, without secrets and user-defined variables."""
    nodes = [dict(node, env=masked_env(node.get("env") or {})) for node in plan["nodes"]]
    values = {str(value) for one in secrets for value in one.values() if len(str(value)) > 3}
    answers = {host: answer_of(result) for host, result in results.items()}
    hosts = {host: answer.evidence or answer.words for host, answer in answers.items()}
    whole = {**told, "plan": dict(plan, nodes=nodes), "hosts": hosts}
    return dict(without(whole, sorted(values, key=len, reverse=True)))


def masked_env(env: Mapping[str, object]) -> Dict[str, object]:
    return {name: value if OPEN_NAMES.fullmatch(name) else MASK for name, value in env.items()}


def without(found: Any, secrets: Sequence[str]) -> Any:
    """The same with every secret masked, at any depth."""
    if isinstance(found, Mapping):
        return {key: without(value, secrets) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without(value, secrets) for value in found]
    if isinstance(found, str):
        for secret in secrets:
            found = found.replace(secret, MASK)
    return found
