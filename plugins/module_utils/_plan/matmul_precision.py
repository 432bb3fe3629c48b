# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The precision of matrix products if the rehearsal chooses, which times a step with each."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from .._contract.document import section

# A CPU with bf16 instructions may be slower with them.
TRIED = ("fp32", "bf16")
# Another precision must be faster by this fraction; measurements are no more exact.
CLEARLY = 1.05


def with_precision(measured: Mapping[str, Any], matmul: str) -> Mapping[str, Any]:
    """A host's measurements with only this precision; empty if it measured only others."""
    if measured.get("matmul", matmul) == matmul:
        return measured
    found = section(section(measured, "products"), matmul)
    return {**measured, **found} if found else {}


def speeds_together(measured: Sequence[Optional[Mapping[str, Any]]]) -> Dict[str, float]:
    """Combined tokens per second of all hosts, for each precision that every host tried."""
    speeds = {matmul: [speed_in(section(section(one, "products"), matmul)) for one in measured] for matmul in TRIED}
    return {matmul: sum(of_all) for matmul, of_all in speeds.items() if of_all and all(of_all)}


def speed_in(measured: Mapping[str, Any]) -> float:
    """Tokens per second; 0 if unknown: the file may contain anything."""
    found = measured.get("tokens_per_second")
    return float(found) if isinstance(found, (int, float)) and found > 0 else 0.0


def fastest(speeds: Mapping[str, float]) -> str:
    """A less exact one only if it is clearly faster."""
    return "bf16" if speeds.get("bf16", 0.0) > CLEARLY * speeds.get("fp32", float("inf")) else "fp32"
