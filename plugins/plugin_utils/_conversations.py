# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file of conversations on the controller, judged by the very code with which the trainer reads it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import ConversationFacts

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
# What the fine-tuning learns from where nobody says something else.
DEMO = TRAINER / "data" / "conversations.jsonl"


def facts(named: str, environment: Mapping[str, str]) -> ConversationFacts:
    """Where the file is, what it holds, and what is wrong with it: {path, sha256, count, problems}."""
    # As the role collect takes a relative path.
    path = Path(environment.get("PWD", ""), os.path.expanduser(named)) if named else DEMO
    rules = trainers_rules()
    try:
        found, wrong = rules.scan(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        problem = f"{path} cannot be read on the controller: {error.strerror or error}"
        return {"path": str(path), "sha256": None, "count": 0, "problems": [problem]}
    return {
        "path": str(path),
        "sha256": digest,
        "count": len(found),
        "problems": [rules.told(wrong)] if wrong else [],
    }


def trainers_rules() -> ModuleType:
    """The trainer's module of them, which needs nothing of the trainer. (runpy does not find it beside Ansible's own importers.)"""
    spec = importlib.util.spec_from_file_location("nanochat_ddp_messages", TRAINER / "nanochat" / "messages.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{TRAINER} does not hold the trainer of this collection")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
