# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot
from ansible_collections.nanochat.ddp.plugins.module_utils._session.boot import session_boot

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


def entered(call, folder, **options):
    return call(session_boot, name=NAME, state_dir=str(folder / "runs/d4"), **options)


def test_crontab_where_systemd_does_not_answer_and_what_else_it_holds_stays(call, host):
    folder = host()
    checked = entered(call, folder, _check_mode=True)
    assert (folder / "crontab").read_text() == FOREIGN
    done = entered(call, folder)
    assert done["changed"] and checked["changed"] and checked["diff"] == done["diff"]
    assert done["way"] == "cron"
    lines = (folder / "crontab").read_text().splitlines()
    assert lines[0] == FOREIGN.strip() and lines[1].startswith("@reboot ") and lines[1].endswith(NAME)
    assert not entered(call, folder)["changed"]
    assert entered(call, folder, state="absent")["changed"]
    assert (folder / "crontab").read_text() == FOREIGN
    assert not entered(call, folder, state="absent")["changed"]


def test_a_unit_of_the_users_systemd_where_the_user_may_linger(call, host):
    folder = host(systemctl="echo $* >>$HOME/../asked; exit 0", loginctl="exit 0")
    assert entered(call, folder, _check_mode=True)["way"] == "systemd"
    unit = folder / "home/.config/systemd/user" / f"{NAME}.service"
    assert not unit.exists()
    assert entered(call, folder)["way"] == "systemd"
    assert f'-B" "{folder}/runs/d4/.boot.py"' in unit.read_text().replace('"-B"', '-B"')
    assert f"--user enable {NAME}" in (folder / "asked").read_text()
    assert (folder / "crontab").read_text() == FOREIGN
    assert not entered(call, folder)["changed"]
    entered(call, folder, state="absent")
    assert not unit.exists()


@pytest.mark.parametrize(
    ("crontab", "cron_runs", "missing"), [(1, False, "no cron is running"), (127, True, "there is no crontab")]
)
def test_where_neither_can_be_had_a_sentence_says_what_is_missing(crontab, cron_runs, missing, call, host, monkeypatch):
    folder = host(crontab=f"exit {crontab}")
    monkeypatch.setattr(boot, "cron_is_running", lambda: cron_runs)
    done = entered(call, folder)
    assert (done["changed"], done["way"]) == (False, "none")
    (warning,) = done["warnings"]
    assert missing in warning and "loginctl enable-linger" in warning


def test_a_crontab_that_refuses_is_told_and_the_run_goes_on(call, host):
    folder = host(crontab='[ "$1" = -l ] && exit 0; echo "you are not allowed" >&2; exit 1')
    done = entered(call, folder)
    assert "failed" not in done and done["way"] == "none"
    assert "you are not allowed" in done["warnings"][0]


# The second is BusyBox's.
@pytest.mark.parametrize("said", ["crontab: no space", "crontab: can't open 'lzw': Input/output error"])
def test_a_crontab_that_cannot_be_read_is_not_written_over(said, call, host):
    folder = host()
    script = (
        (folder / "bin/crontab").read_text().replace("#!/bin/sh\n", f'[ "$1" = -l ] && echo "{said}" >&2 && exit 1\n')
    )
    host(crontab=script)
    done = entered(call, folder)
    assert done["way"] == "none"
    assert "`crontab -l` failed" in done["warnings"][0] and said in done["warnings"][0]
    assert (folder / "crontab").read_text() == FOREIGN


@pytest.mark.parametrize("said", ["no crontab for lzw", "crontab: can't open 'lzw': No such file or directory"])
def test_the_first_line_of_a_user_without_a_crontab(said, call, host):
    folder = host(crontab=f'[ "$1" = -l ] && echo "{said}" >&2 && exit 1; cat "$1" >$HOME/../crontab')
    assert entered(call, folder)["way"] == "cron"
    assert (folder / "crontab").read_text().startswith("@reboot ")


@pytest.mark.parametrize("way", ["cron", "systemd"])
def test_a_host_that_gets_another_rank_keeps_one_entry(way, call, host):
    folder = host(**({"systemctl": "exit 0", "loginctl": "exit 0"} if way == "systemd" else {}))
    for name in (NAME, "nanochat-d4-rank1"):
        assert call(session_boot, name=name, state_dir=str(folder / "runs/d4"))["way"] == way
    units = [path.name for path in (folder / "home").rglob("*.service")]
    lines = [line for line in (folder / "crontab").read_text().splitlines() if "@reboot" in line]
    assert [*units, *lines] == [*units, *lines][:1]
    assert "rank1" in (units or lines)[0]


def test_only_what_did_not_come_to_its_end_before_the_machine_is_started(tmp_path):
    folder = tmp_path / ".session"
    folder.mkdir()
    (folder / "launch.json").write_text(json.dumps({"session": NAME, "id": "1"}))

    def starts(**record):
        (tmp_path / "session.json").write_text(
            json.dumps({"boot_id": "before", "ended": None, "stopped": False, **record})
        )
        return bool(boot.to_start(str(tmp_path)))

    assert starts()
    assert not starts(ended=1.0, exit_code=0)
    assert not starts(ended=1.0, exit_code=1)
    assert not starts(stopped=True)
    # An orderly shutdown, one that took too long, and an address that was not there yet.
    assert starts(ended=1.0, exit_code=75, terminated_by="SIGTERM")
    assert starts(ended=1.0, exit_code=None, signal=9, terminated_by="SIGTERM")
    assert not starts(ended=1.0, exit_code=75, stopped=True)
    here = {"boot_id": boot.processes.boot_id(), "pid": os.getpid()}
    assert not starts(**here, pid_start=boot.processes.start_ticks(os.getpid()))
    # A container that was started again has the boot of before, and perhaps another process of that number.
    assert starts(**here, pid_start=1)
    (folder / "stop").touch()
    assert not starts()
