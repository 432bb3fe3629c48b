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
    table = tmp_path / "crontab"
    table.write_text(FOREIGN)
    crontab = f'case "$1" in -l) cat {table};; *) cat >{table}.new; mv {table}.new {table};; esac'

    def set_up(**given):
        for name, script in {"systemctl": "exit 0", "loginctl": "exit 0", "crontab": crontab, **given}.items():
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


def test_a_unit_of_the_users_systemd_where_the_user_may_linger(session, host):
    folder = host()
    checked = session(check=True)
    unit = folder / "home/.config/systemd/user" / f"{NAME}.service"
    assert not unit.exists()
    done = session()
    assert done["changed"] and checked["changed"] and checked["diff"] == done["diff"]
    assert done["diff"]["after"].endswith("at boot: systemd\n") and done["at_boot"] == checked["at_boot"] == "systemd"
    assert f'"{folder}/{NAME}/.session/runner.py" "{folder}/{NAME}/.session" "boot"' in unit.read_text()
    link = unit.parent / "default.target.wants" / unit.name
    assert link.resolve() == unit
    assert not session()["changed"] and not session(at_boot=None)["changed"]
    assert session(at_boot=False)["changed"] and not unit.exists() and not link.is_symlink()
    # A host that gets another rank keeps one.
    for name in (NAME, "nanochat-d4-rank1"):
        assert session(name)["at_boot"] == "systemd"
    assert [path.name for path in unit.parent.glob("*.service")] == ["nanochat-d4-rank1.service"]
    assert session("nanochat-d4-rank1", state="absent")["changed"] and not list(unit.parent.rglob("*.service"))
    assert (folder / "crontab").read_text() == FOREIGN


@pytest.mark.parametrize("refuses", ["systemctl", "loginctl"])
def test_where_no_unit_can_start_one_sentence_says_what_to_do_and_the_run_goes_on(refuses, session, host, warnings):
    host(**{refuses: "exit 1"})
    done = session()
    assert (done["action"], done["at_boot"]) == ("start", "none")
    (warning,) = warnings
    assert "systemd starts no programs of" in warning
    assert "loginctl enable-linger" in warning and "nanochat.ddp.join" in warning


@pytest.mark.parametrize("wish", [{"at_boot": False}, {"at_boot": True}, {"state": "absent"}])
def test_a_line_that_an_earlier_version_wrote_goes_and_the_rest_of_the_crontab_stays(wish, session, host):
    folder = host()
    lines = [
        f"@reboot /usr/bin/python3 -B {base}/.session/runner.py {base}/.session boot # nanochat.ddp {NAME}\n"
        for base in (folder / NAME, "/elsewhere")
    ]
    (folder / "crontab").write_text("".join([FOREIGN, *lines]))
    session(**wish)
    assert (folder / "crontab").read_text() == FOREIGN + lines[1]


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
