# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verbs that change a host, played by Ansible itself: check mode, diffs, refusals and secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

SECRET = "correct-horse-battery"


def tasks_of(folder: Path, name: str) -> list[dict]:
    session = {"name": name, "state_dir": str(folder / "session")}
    steps = {
        "env": ("env_file", {"path": str(folder / "env"), "env": {"API_KEY": "{{ secret }}", "A": 1}, "secrets": ["API_KEY"]}),
        "env_again": ("env_file", {"path": str(folder / "env"), "env": {"API_KEY": "{{ secret }}", "A": 1}, "secrets": ["API_KEY"]}),
        "env_refused": ("env_file", {"path": str(folder / "other"), "env": {}, "mode": "99"}),
        "folder": ("run_folder", {"path": str(folder / "run"), "plan": {"a": 1}, "host": "x", "keeper_secret": "{{ secret }}"}),
        "folder_again": ("run_folder", {"path": str(folder / "run"), "plan": {"a": 1}}),
        "named": ("tmux_session", {**session, "name": "a.b", "argv": ["/bin/sleep", "600"]}),
        "start": ("tmux_session", {**session, "argv": ["/bin/sleep", "600"]}),
        "start_again": ("tmux_session", {**session, "argv": ["/bin/sleep", "600"]}),
        "stop": ("tmux_session", {**session, "state": "absent"}),
    }  # fmt: skip
    tasks: list[dict] = [
        {"nanochat.ddp.agent": {"verb": verb, **options}, "register": step, "ignore_errors": True}
        for step, (verb, options) in steps.items()
    ]
    found = "{{ dict(names | zip(names | map('extract', vars))) | to_json }}"
    told = {"ansible.builtin.copy": {"content": found, "dest": str(folder / "found")}, "check_mode": False}
    told["vars"] = {"names": list(steps)}
    return [*tasks, told]


def play(folder: Path, *words: str) -> tuple[dict, str]:
    """Each task's result, and the whole output."""
    (folder / "secret.json").write_text(json.dumps({"secret": SECRET}))
    stage, plays = Stage(folder, ["host"]), [{"tasks": tasks_of(folder, f"bare-{os.getpid()}")}]
    said = stage.play(plays, "-e", f"@{folder}/secret.json", *words, ANSIBLE_STDOUT_CALLBACK="default")
    return json.loads((folder / "found").read_text()), said + stage.errors


REFUSED = {"env_refused": "mode '99' is not a quoted octal mode", "named": "'a.b' is not a session name"}


def test_what_changes_a_host_keeps_to_the_rules_of_modules(tmp_path):
    found, said = play(tmp_path, "-vvv")
    for step, words in REFUSED.items():
        assert found[step]["failed"] and words in found[step]["msg"]
    changed = {step for step, result in found.items() if result["changed"]}
    assert changed == {"env", "folder", "start", "stop"}
    assert found["start"]["session"]["state"] == "running" and found["start_again"]["action"] == "none"
    assert (tmp_path / "env").read_text().endswith(f"API_KEY='{SECRET}'\n") and (tmp_path / "run/plan.json").exists()
    assert SECRET not in said and SECRET not in (tmp_path / "found").read_text()


def test_check_mode_tells_what_would_change_and_changes_nothing(tmp_path):
    found, said = play(tmp_path, "--check", "--diff")
    assert {step for step, result in found.items() if result["changed"]} >= {"env", "folder", "start"}
    assert "+API_KEY=********" in said and '+ "a": 1' in said and SECRET not in said
    for step in REFUSED:
        assert found[step]["failed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found", "hosts.json", "play.yml", "secret.json"]
