# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sessions that are started again after a reboot (at_boot), on a tmux server of this test."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot
from ansible_collections.nanochat.ddp.tests.integration.test_tmux_session import jobs, server

__all__ = ["jobs", "server"]
NAME = "nanochat-d4-rank0"
FOREIGN = "0 4 * * * backup\n"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A home and stand-ins for systemctl, loginctl and crontab; `host(SCRIPT=...)` says what they do."""
    tools, home = tmp_path / "bin", tmp_path / "home"
    for folder in (tools, home):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(boot, "cron_is_running", lambda: True)
    (tmp_path / "crontab").write_text(FOREIGN)
    scripts = {
        "systemctl": "exit 1",
        "loginctl": "exit 1",
        "crontab": f'case "$1" in -l) cat {tmp_path}/crontab;; *) cat "$1" >{tmp_path}/crontab;; esac',
    }

    def set_up(**given):
        for name, script in {**scripts, **given}.items():
            (tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name).chmod(0o755)
        return tmp_path

    return set_up


@pytest.fixture
def session(jobs):
    """`session(**options)` plays the module for a session that is to start at boot."""
    made = jobs(NAME)

    def play(name=NAME, state="started", **options):
        made.name = name
        return made.play(state, argv=["/bin/sleep", "600"], **{"at_boot": True, **options})

    return play


def test_crontab_where_systemd_does_not_answer_and_what_else_it_holds_stays(session, host):
    folder = host()
    checked = session(check=True)
    assert (folder / "crontab").read_text() == FOREIGN
    done = session()
    assert done["changed"] and checked["changed"] and checked["diff"] == done["diff"]
    assert done["diff"]["after"].endswith("at boot: cron\n") and done["at_boot"] == "cron"
    lines = (folder / "crontab").read_text().splitlines()
    assert lines[0] == FOREIGN.strip() and lines[1].startswith("@reboot ") and lines[1].endswith(NAME)
    assert not session()["changed"] and not session(at_boot=None)["changed"]
    assert session(at_boot=False)["changed"] and (folder / "crontab").read_text() == FOREIGN
    assert session()["changed"] and session(state="absent")["changed"]
    assert (folder / "crontab").read_text() == FOREIGN
    assert not session(state="absent")["changed"]


def test_a_unit_of_the_users_systemd_where_the_user_may_linger(session, host):
    folder = host(systemctl="exit 0", loginctl="exit 0")
    assert session(check=True)["at_boot"] == "systemd"
    unit = folder / "home/.config/systemd/user" / f"{NAME}.service"
    assert not unit.exists()
    assert session()["at_boot"] == "systemd"
    assert f'"{folder}/{NAME}/.session/runner.py" "{folder}/{NAME}/.session" "boot"' in unit.read_text()
    link = unit.parent / "default.target.wants" / unit.name
    assert link.resolve() == unit
    assert (folder / "crontab").read_text() == FOREIGN
    assert not session()["changed"]
    session(state="absent")
    assert not unit.exists() and not link.is_symlink()


REFUSES = '[ "$1" {} -l ] && {{ echo "{}" >&2; exit 1; }}; [ "$1" = -l ] && cat $HOME/../crontab || cat "$1" >$HOME/../crontab'


# The last two are BusyBox's.
@pytest.mark.parametrize(
    ("crontab", "cron_runs", "said"),
    [
        ("exit 1", False, "neither systemd nor cron"),
        ("exit 127", True, "neither systemd nor cron"),
        (REFUSES.format("!=", "you are not allowed"), True, "you are not allowed"),
        (REFUSES.format("=", "crontab: no space"), True, "crontab: no space"),
        (REFUSES.format("=", "can't open 'lzw': Input/output error"), True, "can't open 'lzw': Input/output error"),
        (REFUSES.format("=", "no crontab for lzw"), True, ""),
        (REFUSES.format("=", "crontab: can't open 'lzw': No such file or directory"), True, ""),
    ],
)
def test_a_crontab_that_refuses_is_told_and_not_written_over_and_the_run_goes_on(
    crontab, cron_runs, said, session, host, monkeypatch, warnings
):
    folder = host(crontab=crontab)
    monkeypatch.setattr(boot, "cron_is_running", lambda: cron_runs)
    done = session()
    assert done["action"] == "start" and done["at_boot"] == ("none" if said else "cron")
    if said:
        (warning,) = warnings
        assert said in warning and "loginctl enable-linger" in warning
        assert (folder / "crontab").read_text() == FOREIGN
    else:
        assert (folder / "crontab").read_text().startswith("@reboot ")


@pytest.mark.parametrize("way", ["cron", "systemd"])
def test_a_host_that_gets_another_rank_keeps_one_entry(way, session, host):
    folder = host(**({"systemctl": "exit 0", "loginctl": "exit 0"} if way == "systemd" else {}))
    with (folder / "crontab").open("a") as file:  # of an earlier version
        file.write(f"@reboot /usr/bin/python3 -B {folder}/{NAME}/.boot.py # nanochat.ddp {NAME}\n")
    for name in (NAME, "nanochat-d4-rank1"):
        assert session(name)["at_boot"] == way
    units = [path.name for path in (folder / "home").rglob("*.service") if not path.is_symlink()]
    lines = [line for line in (folder / "crontab").read_text().splitlines() if "@reboot" in line]
    assert [*units, *lines] == [*units, *lines][:1]
    assert "rank1" in (units or lines)[0]


def test_entries_of_an_earlier_version_go_with_the_wish_and_those_of_another_folder_stay(session, host):
    folder = host(systemctl="exit 0", loginctl="exit 0")
    unit, program = folder / "home/.config/systemd/user/nanochat-d4-rank0.service", folder / NAME / ".boot.py"
    unit.parent.mkdir(parents=True)
    unit.write_text(f'[Service]\nExecStart="/usr/bin/python3" "-B" "{program}"\n')
    program.parent.mkdir(exist_ok=True)
    program.write_text("")
    other = f"@reboot /usr/bin/python3 -B /elsewhere/.session/runner.py /elsewhere/.session boot # nanochat.ddp {NAME}"
    (folder / "crontab").write_text(other + "\n")
    session(at_boot=False)
    assert not unit.exists() and not program.exists()
    assert (folder / "crontab").read_text() == other + "\n"


HERE = {"boot_id": boot.processes.boot_id(), "pid": os.getpid()}
ENDED = [
    ({}, True),
    ({"ended": 1.0, "exit_code": 0}, False),
    ({"ended": 1.0, "exit_code": 1}, False),
    ({"stopped": True}, False),
    # An orderly shutdown, and one that took too long.
    ({"ended": 1.0, "exit_code": 75, "terminated_by": "SIGTERM"}, True),
    ({"ended": 1.0, "exit_code": None, "signal": 9, "terminated_by": "SIGTERM"}, True),
    ({"ended": 1.0, "exit_code": 75, "stopped": True}, False),
    ({**HERE, "pid_start": boot.processes.start_ticks(os.getpid())}, False),
    # A container that was started again has the boot of before, and perhaps another process of that number.
    ({**HERE, "pid_start": 1}, True),
]


@pytest.mark.parametrize(("record", "starts"), ENDED)
def test_only_what_did_not_come_to_its_end_before_the_machine_is_started(record, starts, tmp_path):
    told = {"boot_id": "before", "ended": None, "stopped": False, **record}
    (tmp_path / "session.json").write_text(json.dumps(told))
    assert boot.was_cut_short(str(tmp_path)) is starts
    (tmp_path / ".session").mkdir()
    (tmp_path / ".session/stop").touch()
    assert not boot.was_cut_short(str(tmp_path))
