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
    assert f'"-B" "{folder}/{NAME}/.boot.py"' in unit.read_text()
    link = unit.parent / "default.target.wants" / unit.name
    assert link.resolve() == unit
    assert (folder / "crontab").read_text() == FOREIGN
    assert not session()["changed"]
    session(state="absent")
    assert not unit.exists() and not link.is_symlink()


@pytest.mark.parametrize(("crontab", "cron_runs"), [(1, False), (127, True)])
def test_where_neither_can_be_had_a_sentence_says_so(crontab, cron_runs, session, host, monkeypatch, warnings):
    host(crontab=f"exit {crontab}")
    monkeypatch.setattr(boot, "cron_is_running", lambda: cron_runs)
    assert session()["at_boot"] == "none"
    (warning,) = warnings
    assert "neither systemd nor cron" in warning and "loginctl enable-linger" in warning


# The third is BusyBox's.
@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("", "you are not allowed"),
        ("-l", "crontab: no space"),
        ("-l", "crontab: can't open 'lzw': Input/output error"),
    ],
)
def test_a_crontab_that_refuses_is_told_and_not_written_over_and_the_run_goes_on(verb, said, session, host, warnings):
    folder = host()
    refuses = f'[ "$1" = -l ] {"&&" if verb else "||"} {{ echo "{said}" >&2; exit 1; }}'
    host(crontab=f"{refuses}\n{(folder / 'bin/crontab').read_text()}")
    done = session()
    assert done["action"] == "start" and done["at_boot"] == "none"
    assert said in warnings[0]
    assert (folder / "crontab").read_text() == FOREIGN


@pytest.mark.parametrize("said", ["no crontab for lzw", "crontab: can't open 'lzw': No such file or directory"])
def test_the_first_line_of_a_user_without_a_crontab(said, session, host):
    folder = host(crontab=f'[ "$1" = -l ] && echo "{said}" >&2 && exit 1; cat "$1" >$HOME/../crontab')
    assert session()["at_boot"] == "cron"
    assert (folder / "crontab").read_text().startswith("@reboot ")


@pytest.mark.parametrize("way", ["cron", "systemd"])
def test_a_host_that_gets_another_rank_keeps_one_entry(way, session, host):
    folder = host(**({"systemctl": "exit 0", "loginctl": "exit 0"} if way == "systemd" else {}))
    for name in (NAME, "nanochat-d4-rank1"):
        assert session(name)["at_boot"] == way
    units = [path.name for path in (folder / "home").rglob("*.service") if not path.is_symlink()]
    lines = [line for line in (folder / "crontab").read_text().splitlines() if "@reboot" in line]
    assert [*units, *lines] == [*units, *lines][:1]
    assert "rank1" in (units or lines)[0]


def test_only_what_did_not_come_to_its_end_before_the_machine_is_started(tmp_path):
    folder = tmp_path / ".session"
    folder.mkdir()

    def starts(**record):
        (tmp_path / "session.json").write_text(
            json.dumps({"boot_id": "before", "ended": None, "stopped": False, **record})
        )
        return bool(boot.was_cut_short(str(tmp_path)))

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
