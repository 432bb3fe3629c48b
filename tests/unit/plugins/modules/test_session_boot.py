# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os

import pytest
from ansible.module_utils import basic
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot
from ansible_collections.nanochat.ddp.plugins.modules import session_boot

NAME = "nanochat-d4-rank0"
FOREIGN = "0 4 * * * backup\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A home and stand-ins for systemctl, loginctl and crontab; `host(SCRIPT=...)` says what they do."""
    tools, home, run_dir = tmp_path / "bin", tmp_path / "home", tmp_path / "runs" / "d4"
    for folder in (tools, home, run_dir):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(boot, "cron_is_running", lambda: True)
    (tmp_path / "crontab").write_text(FOREIGN)
    scripts = {
        "systemctl": f"echo $* >>{tmp_path}/asked; exit 1",
        "loginctl": "exit 1",
        "crontab": f'case "$1" in -l) cat {tmp_path}/crontab;; *) cat "$1" >{tmp_path}/crontab;; esac',
    }

    def set_up(**given):
        for name, script in {**scripts, **given}.items():
            (tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name).chmod(0o755)
        return tmp_path

    return set_up


def call(run_module, folder, **options):
    return run_module(session_boot, name=NAME, state_dir=str(folder / "runs/d4"), **options)


def test_crontab_where_systemd_does_not_answer_and_what_else_it_holds_stays(run_module, host):
    folder = host()
    checked = call(run_module, folder, _check_mode=True)
    assert (folder / "crontab").read_text() == FOREIGN
    done = call(run_module, folder)
    assert done["changed"] and checked["changed"] and checked["diff"] == done["diff"]
    assert done["way"] == "cron"
    lines = (folder / "crontab").read_text().splitlines()
    assert lines[0] == FOREIGN.strip() and lines[1].startswith("@reboot ") and lines[1].endswith(NAME)
    assert not call(run_module, folder)["changed"]
    assert call(run_module, folder, state="absent")["changed"]
    assert (folder / "crontab").read_text() == FOREIGN
    assert not call(run_module, folder, state="absent")["changed"]


def test_a_unit_of_the_users_systemd_where_the_user_may_linger(run_module, host):
    folder = host(systemctl="echo $* >>$HOME/../asked; exit 0", loginctl="exit 0")
    assert call(run_module, folder, _check_mode=True)["way"] == "systemd"
    unit = folder / "home/.config/systemd/user" / f"{NAME}.service"
    assert not unit.exists()
    assert call(run_module, folder)["way"] == "systemd"
    assert f'-B" "{folder}/runs/d4/.boot.py"' in unit.read_text().replace('"-B"', '-B"')
    assert f"--user enable {NAME}" in (folder / "asked").read_text()
    assert (folder / "crontab").read_text() == FOREIGN
    assert not call(run_module, folder)["changed"]
    call(run_module, folder, state="absent")
    assert not unit.exists()


@pytest.mark.parametrize(
    ("crontab", "cron_runs", "missing"), [(1, False, "no cron is running"), (127, True, "there is no crontab")]
)
def test_where_neither_can_be_had_a_sentence_says_what_is_missing(
    crontab, cron_runs, missing, run_module, host, monkeypatch
):
    folder = host(crontab=f"exit {crontab}")
    monkeypatch.setattr(boot, "cron_is_running", lambda: cron_runs)
    warnings: list[str] = []
    monkeypatch.setattr(basic.AnsibleModule, "warn", lambda self, text: warnings.append(text))
    done = call(run_module, folder)
    assert (done["changed"], done["way"]) == (False, "none")
    (warning,) = warnings
    assert missing in warning and "loginctl enable-linger" in warning


def test_a_crontab_that_refuses_is_named(run_module, host):
    folder = host(crontab='[ "$1" = -l ] && exit 0; echo "you are not allowed" >&2; exit 1')
    result = call(run_module, folder)
    assert result["failed"] and "you are not allowed" in result["msg"]


def test_only_what_did_not_end_before_the_machine_is_started(tmp_path):
    folder = tmp_path / ".session"
    folder.mkdir()
    (folder / "launch.json").write_text(json.dumps({"session": NAME, "id": "1"}))

    def starts(**record):
        (tmp_path / "session.json").write_text(
            json.dumps({"boot_id": "before", "ended": None, "stopped": False, **record})
        )
        return bool(boot.to_start(str(tmp_path)))

    assert starts()
    assert not starts(ended=1.0)
    assert not starts(stopped=True)
    here = {"boot_id": boot.processes.boot_id(), "pid": os.getpid()}
    assert not starts(**here, pid_start=boot.processes.start_ticks(os.getpid()))
    # A container that was started again has the boot of before, and perhaps another process of that number.
    assert starts(**here, pid_start=1)
    (folder / "stop").touch()
    assert not starts()
