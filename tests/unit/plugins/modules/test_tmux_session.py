# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The predictions, diffs and refusals of the module, on a tmux server of this test; tests/integration has whole sessions."""

from __future__ import annotations

import json
import os
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.logind import Logind, logind
from ansible_collections.nanochat.ddp.plugins.module_utils._session import session as session_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tmux as tmux_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session import wanted
from ansible_collections.nanochat.ddp.tests.integration.test_tmux_session import SLEEP, job, jobs, living, server, tmux

__all__ = ["job", "jobs", "server"]
ARGV = ["/bin/true", "a b"]
ASLEEP = [sys.executable, "-c", SLEEP]


def test_check_mode_tells_the_same_and_does_nothing(job, tmp_path):
    # On a bare host it needs neither folder nor environment.
    bare_host = job.play(check=True, env_file=str(tmp_path / "env"), argv=["/no/python"])
    assert bare_host["changed"] and bare_host["session"] == {"state": "absent"}
    checked = job.play(check=True, argv=ARGV)
    assert not job.folder.exists()

    done = job.play(argv=ARGV)
    assert checked["changed"] and checked["action"] == done["action"] == "start" and checked["diff"] == done["diff"]
    assert checked["diff"]["before"] == "state: absent\n"
    assert checked["diff"]["after"].startswith("state: running\n")
    assert "argv:\n  /bin/true\n  'a b'\n" in checked["diff"]["after"]
    assert (job.folder / "run.sh").read_text() == (
        f"#!/bin/sh\n# What the tmux session job-1 runs; by hand: sh run.sh\ncd {job.folder} || exit 1\n"
        "exec /bin/true \\\n  'a b'\n"
    )
    assert (job.folder / ".session/launch.json").stat().st_mode & 0o777 == 0o600


def test_what_is_done_with_a_session_that_has_ended(job):
    job.play(argv=ARGV)
    job.ended()

    for options, action in (
        ({}, "none"),
        ({"rerun": True}, "start"),
        ({"argv": ["/bin/false"]}, "start"),
        ({"chdir": "/"}, "start"),
        ({"state": "restarted"}, "start"),
        ({"state": "stopped"}, "none"),
        ({"state": "absent"}, "remove"),
    ):
        result = job.play(check=True, **{"argv": ARGV, **options})
        assert (result["action"], result["changed"]) == (action, action != "none"), options
        assert result["session"]["state"] == "finished" and result["session"]["exit_code"] == 0
    # Under another name it is started, and nothing of the older one stays behind.
    job.name = "later"
    assert job.play(argv=ARGV)["action"] == "start"
    assert tmux("has-session", "-t", "=job-1").returncode == 1


def test_the_environments_values_are_never_shown(job, tmp_path):
    env = tmp_path / "env"
    env.write_text("KEY='correct-horse'\n")
    before = job.play(argv=ASLEEP, env_file=str(env))
    env.write_text("KEY='battery-staple'\n")
    after = job.play(argv=ASLEEP, env_file=str(env), check=True)

    assert before["diff"]["after"].endswith("env:\n  KEY\n")
    assert after["action"] == "restart" and after["diff"]["after"].endswith("env:\n  KEY (changed)\n")
    everything = f"{before} {after} {(job.folder / '.session/launch.json').read_text()}"
    assert "correct-horse" not in everything and "battery-staple" not in everything


@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"pid_start": 1}], ids=["booted since", "pid taken since"])
def test_the_pid_of_a_record_that_belongs_to_another_by_now_is_not_touched(job, changed, tmp_path):
    session = job.start(SLEEP)["session"]
    good = (job.folder / "session.json").read_text()
    # The id that its processes have is another one, too.
    (job.folder / "session.json").write_text(json.dumps({**session, "id": "another", **changed}))
    try:
        stopped = job.play("stopped")
        assert not stopped["changed"] and stopped["session"]["state"] == "gone"
        assert living(session["pid"]) and living(session["child_pid"])
    finally:
        (job.folder / "session.json").write_text(good)


@pytest.mark.parametrize("state", ["started", "restarted", "stopped", "absent"])
def test_a_missing_tmux_is_said_before_anything_is_written_and_nothing_to_stop_needs_none(job, monkeypatch, state):
    monkeypatch.setattr(bare, "find", lambda name: None)
    for check in (True, False):
        result = job.play(state, check, argv=ARGV)
        if state.endswith("started"):
            assert result["failed"] and result["msg"] == "tmux is not installed on this host; install the package tmux"
        else:
            assert not result["changed"] and result["session"] == {"state": "absent"}
    assert not job.folder.exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"argv": []}, "argv must begin with a program, not with nothing"),
        ({"argv": ["-c"]}, "argv must begin with a program, not with '-c'"),
        ({"argv": ["/no/python"]}, "/no/python does not exist or cannot be executed"),
        ({"chdir": "/no"}, "its folder /no does not exist"),
        ({"env_file": "/no/env"}, "its environment file /no/env does not exist"),
        ({"log": "/proc/no/log"}, "cannot write /proc/no"),
        ({"argv": ["a", "b\0"]}, "argv[1] contains a NUL byte"),
        *(
            ({"name": name}, f"{name!r} is not a session name")
            for name in ("a.b", "a:b", "", "-a", "=a", "a b", "a\n", "ü")
        ),
    ],
)
def test_refuses_what_cannot_run_and_names_that_tmux_would_read_otherwise(job, options, words):
    job.name = options.pop("name", job.name)
    result = job.play(**{"argv": ARGV, **options})
    job.name = "job-1"

    assert result["failed"] and words in result["msg"]
    assert tmux("has-session", "-t", "=job-1").returncode == 1


def test_a_runner_that_does_not_come_up_is_shown_and_a_session_of_somebody_else_is_not_replaced(job, monkeypatch):
    monkeypatch.setattr(session_utils, "_START_SECONDS", 3)
    monkeypatch.setattr(session_utils.host_code, "program", lambda *words: "raise SystemExit('no such thing')")
    result = job.play(argv=ARGV)
    assert result["failed"] and "its pane shows: no such thing" in result["msg"]

    tmux("kill-session", "-t", "=job-1")
    tmux("new-session", "-d", "-s", "job-1", "sleep 600")
    result = job.play(argv=ARGV)
    assert result["failed"] and "tmux already has a session job-1 that nanochat.ddp did not start" in result["msg"]
    assert tmux("list-panes", "-t", "=job-1", "-F", "#{pane_dead}").stdout == "0\n"


@pytest.mark.parametrize(
    "kills, lingers, in_login, warned, scoped",
    [
        (False, False, True, False, False),
        (True, False, True, True, False),
        (True, True, False, False, True),
        (True, True, True, True, True),  # an older tmux server, started from the login itself, took the session in
    ],
)
def test_field_12_logging_out_where_systemd_kills(
    job, tmp_path, monkeypatch, warnings, kills, lingers, in_login, warned, scoped
):
    program, scope = tmp_path / "systemd-run", tmp_path / "scope"
    program.write_text(f'#!/bin/sh\necho "$@" >{scope}\nshift 4\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(wanted, "logind", lambda user: Logind(kills, lingers))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(tmux_utils, "ends_with_login", lambda pid: in_login)

    assert job.play(argv=ASLEEP)["changed"]

    assert len(warnings) == warned
    assert not warned or "loginctl enable-linger" in warnings[0]
    assert scope.exists() == scoped
    assert not scoped or scope.read_text().startswith("--user --scope --quiet -- ")


def test_whoever_cannot_be_ended_is_named(job, monkeypatch):
    stubborn = processes.process(job.start(SLEEP)["session"]["child_pid"])
    with monkeypatch.context() as patched:
        patched.setattr(session_utils.reaper, "end", lambda session, grace: {stubborn.pid: stubborn})
        for state in ("stopped", "absent", "restarted"):
            result = job.play(state, argv=ASLEEP)
            assert result["failed"]
            assert f"these processes are still alive after SIGKILL: {stubborn.pid} ({sys.executable}" in result["msg"]


def test_a_play_inside_the_session_does_not_stop_itself(job):
    job.start(SLEEP)
    good, pid = job.record(), os.getpid()
    inside = {**good, "pid": pid, "pid_start": processes.start_ticks(pid)}
    (job.folder / "session.json").write_text(json.dumps(inside))
    try:
        result = job.play("stopped")
        assert result["failed"] and "runs inside the session" in result["msg"]
    finally:
        (job.folder / "session.json").write_text(json.dumps(good))


@pytest.mark.parametrize(("user", "kills"), [("root", False), ("lzw", True)])
def test_root_is_excluded_from_the_killing_by_default(user, kills, monkeypatch):
    monkeypatch.setattr(bare, "tool", lambda argv: (0, "KillUserProcesses=yes\nKillExcludeUsers=root\nLinger=no\n", ""))
    assert logind(user) == (kills, False)
    monkeypatch.setattr(bare, "tool", lambda argv: (127, "", "not installed"))
    assert logind(user) == (False, False)


@pytest.fixture
def answers(monkeypatch):
    """A tmux that answers so, the last for ever."""

    def scripted(*told):
        left = list(told)
        monkeypatch.setattr(bare, "find", lambda name: "/opt/tmux")
        monkeypatch.setattr(bare, "run", lambda argv, **more: left.pop(0) if len(left) > 1 else left[0])
        return tmux_utils.Tmux()

    return scripted


ENDING = (1, "", "server exited unexpectedly")


def test_a_tmux_server_that_is_just_ending_is_asked_again_and_not_for_ever(answers):
    answers(ENDING, (0, "", "")).start("job", "1", "/a")
    answers((1, "", "can't find session: job")).kill("job")
    with pytest.raises(tmux_utils.TmuxError, match="server exited"):
        answers(ENDING).start("job", "1", "/a")
    with pytest.raises(tmux_utils.TmuxError, match="server exited unexpectedly"):
        answers(*[ENDING] * 5, (0, "", "")).kill("job")


def test_tmuxs_own_words_are_passed_on(answers):
    with pytest.raises(
        tmux_utils.TmuxError, match=r"session job: `/opt/tmux new-session -d -s \.\.\.` failed: no fork"
    ):
        answers((1, "", "no fork\n")).start("job", "1", "/a")
    with pytest.raises(tmux_utils.TmuxError, match="does not understand /opt/tmux: protocol version mismatch"):
        answers((1, "", "protocol version mismatch (client 8, server 7)")).look("job")
