# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host whose Python answers what it likes, and what it brought back earlier (docs/trust.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import MARK
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage, results

OBEYED = "\x1b]52;c;ZXZpbA==\x07\x1b]0;evil\x07\x9b\u202e"


@pytest.fixture
def evil(tmp_path):
    """`evil(playbook, answer, ...)` plays against a host that gives this answer to everything; returns what is printed."""

    stage, python = Stage(tmp_path, ["evil"]), tmp_path / "python"
    python.write_text('#!/bin/sh\ncat > /dev/null\ncat "$0.says"\n')
    python.chmod(0o755)
    stage.variables["ansible_python_interpreter"] = str(python)

    def play(book: str | list[dict[str, Any]], answer: str, *words: str, **environment: str) -> str:
        Path(f"{python}.says").write_text(answer + "\n")
        return stage.play(book, *words, code=None, PWD=str(tmp_path), **environment) + stage.errors

    return play


def told(**answer: Any) -> str:
    return MARK + json.dumps(answer)


@pytest.mark.parametrize(
    ("playbook", "words", "answer"),
    [
        ("logs", (), {"run": {**EMPTY, "state": "running", "log": "/x", "last_lines": [f"step {OBEYED}3"]}}),
        ("status", (), {"failed": True, "msg": f"no run {OBEYED}here"}),
        ("plan", (), {"failed": True, "msg": f"no facts {OBEYED}here"}),
        ("collect", ("-v",), {"failed": True, "msg": f"no run {OBEYED}here"}),
    ],
)
def test_no_display_of_ours_hands_a_terminal_what_it_would_obey(evil, playbook, words, answer):
    said = evil(f"nanochat.ddp.{playbook}", told(**answer), *words)
    assert "step 3" in said or "here" in said, said
    assert not [one for one in OBEYED if not one.isprintable() and one in said], ascii(said)


def told_names(evil, task: dict[str, Any], answer: str, **environment: str) -> str:
    """Plays one task, and then what it could have changed: the hosts, and variables that name files of the controller."""
    names = "{{ groups.trainers | join(',') }} {{ trainer_src | default('ours') }} {{ chat_python | default('ours') }}"
    tasks = [task, {"ansible.builtin.debug": {"msg": f"names: {names}"}}]
    return str(evil([{"tasks": tasks}], answer, **environment))


FACTS = {"ansible_facts": {"trainer_src": "/etc", "chat_python": "/bin/evil"}}


def test_a_look_takes_in_no_host_and_sets_no_variable(evil):
    another = {"host_name": "another", "groups": ["trainers"], "host_vars": {"ansible_connection": "local"}}
    answer = told(run=EMPTY, add_host=another, **FACTS, _ansible_no_log=True, show="text of evil")
    # Also where Ansible makes variables of facts, as it does without our ansible.cfg.
    look = {"nanochat.ddp.agent": {"verb": "run_info", "run_dir": "/x"}}
    said = told_names(evil, look, answer, ANSIBLE_INJECT_FACT_VARS="1")
    assert "names: evil ours ours" in said and "text of evil" not in said, said


def test_in_the_checkout_no_fact_becomes_a_variable(evil):
    said = told_names(evil, {"ansible.builtin.stat": {"path": "/x"}}, json.dumps({"stat": {}, **FACTS}))
    assert "names: evil ours ours" in said, said


def test_facts_that_cannot_be_make_no_plan(evil):
    said = evil("nanochat.ddp.plan", told(probe={"ephemeral": {"low": "1\nkernel.sysrq = 1", "high": 65535}}))
    assert (
        "evil sent an invalid answer: its ephemeral" in said
        and "check that host: it may be compromised or broken" in said
    ), said


def test_a_stop_does_not_wait_for_as_long_as_a_host_likes(evil):
    run = {**EMPTY, "run": "d4", "state": "running", "rank": 0, "run_dir": "/x", "stop_seconds": 1e12}
    said = evil("nanochat.ddp.stop", told(run=run), ANSIBLE_STDOUT_CALLBACK="ansible.posix.json")
    account = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert results(account, "Fail if the run is ambiguous")["evil"]["seconds"] == 60


@pytest.mark.parametrize(
    ("playbook", "words"), [("status", "evil: "), ("stop", "evil: nothing was stopped there, since ")]
)
def test_a_run_that_cannot_be_is_a_sentence_about_its_host(evil, playbook, words):
    run = {**EMPTY, "run": "d4", "state": "running", "rank": 0, "run_dir": "/x", "done": [7]}
    said = " ".join(evil(f"nanochat.ddp.{playbook}", told(run=run)).split())
    assert f"{words}evil sent an invalid answer: its done: " in said, said
    assert "Traceback" not in said and "filter plugin" not in said
