# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What several measurements need of the standard library alone."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a metrics file, as far as its lines are whole."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]
