# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks the controller's file of conversations by the trainer's rules."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..module_utils._contract.plan import ConversationFacts
from ..module_utils._rules import messages

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
# Default conversations for fine-tuning.
DEMO = TRAINER / "data" / "conversations.jsonl"


def facts(named: str, environment: Mapping[str, str]) -> ConversationFacts:
    """The file's path, content and errors: {path, sha256, count, problems}."""
    # The role collect resolves relative paths the same way.
    path = Path(environment.get("PWD", ""), os.path.expanduser(named)) if named else DEMO
    try:
        found, wrong = messages.scan(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        problem = f"{path} cannot be read on the controller: {error.strerror or error}"
        return {"path": str(path), "sha256": None, "count": 0, "problems": [problem]}
    return {
        "path": str(path),
        "sha256": digest,
        "count": len(found),
        "problems": [messages.summary(wrong)] if wrong else [],
    }
