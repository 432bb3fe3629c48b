# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The display works in a version of Ansible that has renamed what it does not document."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.callback import CallbackBase
from ansible.plugins.callback.default import CallbackModule
from ansible_collections.nanochat.ddp.plugins.callback import story
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display.texts import step_of

PRIVATE = ("_handle_warnings_and_exception", "_dump_results", "_get_diff")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines on the screen."""
    lines: list[str] = []
    monkeypatch.setattr(story.display, "display", lambda text, *dummy, **options: lines.append(text))
    monkeypatch.setattr(story.display, "warning", lambda text, *dummy, **options: lines.append(f"warning {text}"))
    monkeypatch.setattr(story.atexit, "register", lambda call: None)
    return lines


def result(action: str = "nanochat.ddp.env_file", **values: Any) -> Any:
    name, path = "nanochat.ddp.launch : Write", "roles/launch/main.yml:1"
    task = SimpleNamespace(action=action, loop=None, run_once=False, get_name=lambda: name, get_path=lambda: path)
    task.ignore_errors = False
    return SimpleNamespace(task=task, host=SimpleNamespace(get_name=lambda: "laptop"), result=values)


@pytest.mark.parametrize("gone", [(), PRIVATE])
def test_warnings_results_and_differences_are_shown(
    shown: list[str], gone: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in gone:
        for base in (CallbackBase, CallbackModule):
            monkeypatch.delattr(base, name, raising=False)
    display: Any = story.Story()
    display.set_options()
    display.v2_runner_on_ok(result("debug", value={"depth": 4}))
    display.v2_runner_on_failed(result(rc=3, exception="Traceback"))
    if gone:
        display.v2_runner_on_skipped(result(warnings=["the clock is off"]))
        assert "warning the clock is off" in shown
    display.v2_on_file_diff(result(changed=True, diff=[{"before": "a\n", "after": "b\n"}]))
    text = "\n".join(shown)
    assert "depth" in text and "rc" in text and "laptop: Write" in text
    assert "Traceback" not in text


def test_the_step_of_a_task_is_told_from_its_name() -> None:
    assert step_of(SimpleNamespace(get_name=lambda: "nanochat.ddp.launch : Write")) == "launch"
    assert step_of(SimpleNamespace(get_name=lambda: "Write", _role=None)) is None
    rehearsing = SimpleNamespace(get_name=lambda: "nanochat.ddp.preflight : Measure a step", tags=["rehearse"])
    assert step_of(rehearsing) == "rehearsal"


def test_a_second_interrupt_does_not_take_the_last_words_away():
    told: list[str] = []
    heard: list[int] = []

    def say(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        told.append(text)

    terminal = SimpleNamespace(leave=lambda: True, say=say, quiet=False)
    ledger = SimpleNamespace(seen=lambda: [SimpleNamespace(verdict=None)])
    shown: Any = SimpleNamespace(_terminal=terminal, _ledger=ledger)
    before = signal.signal(signal.SIGINT, lambda number, dummy: heard.append(number))
    try:
        story.Story._at_exit(shown)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told[0].startswith("Training continues in the background")
    assert not heard
