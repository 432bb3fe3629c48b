# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folders and files that another user of a host could change are refused, with the command to type; ours are made so that none is."""

from __future__ import annotations

import os
import signal
import stat
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper.deployment import run_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.host import host_info
from ansible_collections.nanochat.ddp.tests.integration.local import until
from ansible_collections.nanochat.ddp.tests.integration.test_tmux_session import SLEEP, job, jobs, living, server

__all__ = ["job", "jobs", "server"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
NOBODY, DAEMONS = 65534, 1
PLAN = {"nodes": [], "run": "d4"}


# Of the base folder or the one above it: owner and group, mode, and what is told.
REFUSED = [
    (
        False,
        NOBODY,
        NOBODY,
        0o755,
        "{path} belongs to nobody, who could change what root runs there: chown -R root: {path}",
    ),
    (False, 0, 0, 0o1777, "every user may write to {path} and so change what root runs: chmod go-w {path}"),
    (False, 0, DAEMONS, 0o775, "daemon may write to {path} and so change what root runs: chmod go-w {path}"),
    (True, 0, 0, 0o777, "every user may write to {path} and so change what root runs: chmod +t {path}"),
    (True, 0, DAEMONS, 0o775, "daemon may write to {path} and so change what root runs: chmod +t {path}"),
]


@pytest.mark.parametrize(("above", "user", "group", "mode", "told"), REFUSED)
def test_a_folder_that_others_may_change_is_refused_before_anything_is_there(
    above, user, group, mode, told, call, tmp_path
):
    base = tmp_path / "place" / "nanochat"
    base.mkdir(parents=True)
    changed = base.parent if above else base
    os.chown(changed, user, group)
    changed.chmod(mode)
    told = told.format(path=changed)
    assert call(host_info, base_dir=str(base))["probe"]["disk"]["exposed"] == told
    folder = call(run_folder, path=str(base / "runs/d4"), plan=PLAN, state="ready")
    assert folder["failed"] and told in folder["msg"]
    run = call(run_folder, path=str(base), plan=PLAN, state="ready")
    assert run["failed"] and told in run["msg"] and not list(base.iterdir())


def test_what_only_this_user_may_change_is_not_refused(call, tmp_path):
    """Below a folder like /tmp, and writable by a group of which nobody else is."""
    place = tmp_path / "place"
    base = place / "nanochat"
    base.mkdir(parents=True)
    place.chmod(0o1777)
    base.chmod(0o775)
    assert call(host_info, base_dir=str(base))["probe"]["disk"]["exposed"] == ""
    assert call(run_folder, path=str(base / "runs/d4"), plan=PLAN, state="ready")["changed"]


def test_whatever_the_umask_nobody_else_may_write_what_is_made(job):
    before = os.umask(0o000)
    try:
        job.start("open('made', 'w'); " + SLEEP)
    finally:
        os.umask(before)
    made = until(lambda: (job.folder / "made").exists() and [job.folder, *job.folder.rglob("*")])
    assert not [path for path in made if not path.is_symlink() and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]


@pytest.mark.parametrize("name", ["run.sh", "program", ""])
def test_what_somebody_else_may_have_changed_is_not_started(name, job, tmp_path):
    program = job.folder / "program"
    job.folder.mkdir()
    program.write_text(f"#!{sys.executable}\n{SLEEP}\n")
    program.chmod(0o755)
    given = {"argv": [str(program)], "revive": True}
    session = job.play(**given)["session"]
    child = until(lambda: job.record().get("child_pid"))
    (job.folder / name).chmod(0o777)
    # At once where the session starts it again, and when a user does.
    os.kill(child, signal.SIGKILL)
    ended = job.ended()
    assert (ended["exit_code"], ended["revived"]) == (1, 1)
    until(lambda: not living(session["pid"]))
    assert f"is not started: every user may write to {job.folder / name}".rstrip("/") in job.lines()[-1]
    refused = job.play(**given, rerun=True)
    assert refused["failed"] and "chmod go-w" in refused["msg"]
    (job.folder / name).chmod(0o755)
    assert job.play(**given, rerun=True)["session"]["state"] == "running"
