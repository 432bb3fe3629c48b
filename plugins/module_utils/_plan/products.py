# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The precision of the matrix products where that is left to the rehearsal, which measures a step with each."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import section

# A CPU may have instructions for bf16 and be slower with them.
TRIED = ("fp32", "bf16")
# By so much another precision, or another set of processors than the usual one, has to be faster; a measurement is not exacter.
CLEARLY = 1.05


def of_products(measured: Mapping[str, Any], matmul: str) -> Mapping[str, Any]:
    """A host's measurements with these products, as if there were no others; empty where it measured others only."""
    if measured.get("matmul", matmul) == matmul:
        return measured
    found = section(section(measured, "products"), matmul)
    return {**measured, **found} if found else {}


def speeds_together(measured: Sequence[Optional[Mapping[str, Any]]]) -> Dict[str, float]:
    """Tokens per second of all hosts together with each of the products that every host tried."""
    speeds = {matmul: [_speed(one or {}, matmul) for one in measured] for matmul in TRIED}
    return {matmul: sum(of_all) for matmul, of_all in speeds.items() if of_all and all(of_all)}


def _speed(measured: Mapping[str, Any], matmul: str) -> float:
    """0 where it is not known; the file may hold anything."""
    found = section(section(measured, "products"), matmul).get("tokens_per_second")
    return float(found) if isinstance(found, (int, float)) and found > 0 else 0.0


def begun_with(kept: Sequence[object]) -> Optional[str]:
    """The products that the run of these hosts began with, None where there is none."""
    return next((matmul for matmul in TRIED if matmul in kept), None)


def fastest(speeds: Mapping[str, float]) -> str:
    """The least exact one only where it is clearly faster."""
    return "bf16" if speeds.get("bf16", 0.0) > CLEARLY * speeds.get("fp32", float("inf")) else "fp32"
