# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the demo says at its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import ranks
from pyarrow import parquet as pq

PROGRAM = ranks.HERE.parents[1] / "tools" / "demo_result.py"
TEXT = "The quick brown fox jumps over the lazy dog. " * 400


@pytest.mark.parametrize(("bits", "end"), [(0.01, ": it predicts this text better than xz packs it."), (8.0, ".")])
def test_the_result_is_compared_with_packers_and_told_in_80_columns(tmp_path: Path, bits: float, end: str) -> None:
    for number in range(2):
        pq.write_table(pa.table({"text": [TEXT]}), tmp_path / f"shard_0000{number}.parquet")
    (tmp_path / "plan.json").write_text(json.dumps({"nodes": [{"rank": 0, "data_dir": str(tmp_path)}, {"rank": 1}]}))
    samples = [
        {"kind": "sample", "step": 100 * n, "prompt": "If the", "text": f"If the\n   number is {n}. " * 9}
        for n in range(1, 8)
    ]
    events = [*samples, {"kind": "eval", "step": 700, "val_bpb": bits}]
    (tmp_path / "metrics-rank0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    told = subprocess.run([sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, check=True).stdout
    assert max(map(len, told.splitlines())) <= 80
    assert [line.split(":")[0].strip() for line in told.splitlines() if "step" in line] == [
        "step 100",
        "step 400",
        "step 700",
    ]
    assert f"needs {bits:.2f} bits per byte, gzip 0." in " ".join(told.split()) and told.rstrip().endswith(end)
