# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs that roles and playbooks call are there, and take what they are given."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import verbs
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import HOST_VERBS

ROOT = Path(__file__).resolve().parents[4]


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    module = importlib.import_module(f"{host_code.PACKAGE}.{HOST_VERBS[verb]}")
    return dict(inspect.signature(getattr(module, verb)).parameters)


def calls(node: Any) -> list[dict[str, Any]]:
    """The parameters of every call in a file of tasks or plays."""
    if isinstance(node, dict):
        own = [node["nanochat.ddp.agent"]] if "nanochat.ddp.agent" in node else []
        return own + [one for value in node.values() for one in calls(value)]
    return [one for value in node for one in calls(value)] if isinstance(node, list) else []


CALLS = [
    (path.name, one)
    for folder in ("roles", "playbooks")
    for path in sorted((ROOT / folder).rglob("*.yml"))
    for one in calls(yaml.safe_load(path.read_text()))
]


@pytest.mark.parametrize(("file", "call"), CALLS, ids=lambda one: one["verb"] if isinstance(one, dict) else one)
def test_a_task_calls_a_verb_with_its_parameters(file, call):
    given, found = set(call) - {"verb"}, verbs.on_controller(call["verb"])
    asked = dict(inspect.signature(found).parameters) if found else parameters(call["verb"])
    asked.pop("call", None)
    more = {name for name, one in asked.items() if one.kind is inspect.Parameter.VAR_KEYWORD}
    needed = {name for name, one in asked.items() if one.default is inspect.Parameter.empty}
    assert needed - more - {"check", "host"} <= given, file
    assert more or given <= set(asked), file


def test_another_word_is_refused(agent):
    with pytest.raises(AnsibleError, match="dance is no verb"):
        agent("dance")
