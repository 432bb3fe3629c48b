# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the product does is what was recorded. What is meant to change is recorded again: `tests/pins/record.py TOPIC`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.tests.pins import record

MOST = 40


def differences(was: Any, now: Any, share: float, place: str = "") -> Iterator[str]:
    """Where the two differ; numbers may by this share of them, and lines by the width of columns, which times in them have a part in."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differences(was.get(key, "nothing"), now.get(key, "nothing"), share, f"{place}/{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for at, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from differences(one, other, share, f"{place}/{at}")
    elif isinstance(was, float) and isinstance(now, (int, float)):
        if not math.isclose(was, now, rel_tol=share, abs_tol=1e-6):
            yield f"{place}: was {was}, is {now}"
    elif re.sub("  +", "  ", str(was)) != re.sub("  +", "  ", str(now)) or type(was) is not type(now):
        yield f"{place}:\n  was {was!r}\n  is  {now!r}"


@pytest.mark.parametrize("topic", record.TOPICS)
def test_the_product_does_what_was_recorded(topic: str, tmp_path: Path) -> None:
    now = {record.file_of(topic, part).stem: content for part, content in record.seen(topic, tmp_path).items()}
    # Processors round differently, and a training makes more of it.
    found = list(differences(record.recorded(topic), now, 0.02 if topic == "training" else 0.001))
    more = f"\nand {len(found) - MOST} more" if len(found) > MOST else ""
    assert not found, (
        f"{topic} changed; if that is right: tests/pins/record.py {topic}\n" + "\n".join(found[:MOST]) + more
    )
