# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module against a scripted tmux; tests/integration has the same against a real one."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.logind import logind
from ansible_collections.nanochat.ddp.plugins.module_utils._session import session as session_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tmux as tmux_utils
from ansible_collections.nanochat.ddp.plugins.modules import tmux_session


class Host:
    """Answers for tmux and loginctl, and writes the record as the runner would."""

    def __init__(self, state_dir, pid):
        self.state_dir = state_dir
        self.pid = pid  # of what stands for the runner
        self.installed = {"tmux"}
        self.calls = []
        self.sessions = {}  # name -> label
        self.pane = "1 1"  # dead
        self.refuses = ""
        self.silent = False
        self.logind = ""

    def find(self, name):
        program = name.rpartition("/")[2]
        return f"/usr/bin/{program}" if program in self.installed else None

    def run(self, argv, **options):
        self.calls.append(argv)
        if argv[0].endswith("loginctl"):
            return 0, self.logind, ""
        at = argv.index("/usr/bin/tmux")
        return getattr(self, argv[at + 1].replace("-", "_"))(argv[at + 2 :])

    def has_session(self, words):
        return (0, "", "") if self.name(words) in self.sessions else (1, "", "can't find session")

    def show_options(self, words):
        label = self.sessions.get(self.name(words)) if words[-1] == "@nanochat_ddp" else "/elsewhere"
        return (0, f"{label}\n", "") if label else (1, "", "can't find session")

    def list_panes(self, words):
        return 0, f"{self.pane}\n", ""

    def capture_pane(self, words):
        return 0, "\nTraceback: no such thing\n\n", ""

    def kill_session(self, words):
        del self.sessions[self.name(words)]
        return 0, "", ""

    def new_session(self, words):
        if self.refuses:
            return 1, "", self.refuses
        self.sessions[words[words.index("-s") + 1]] = words[words.index("@nanochat_ddp") + 1]
        if not self.silent:
            self.write_record()
        return 0, "", ""

    def write_record(self):
        launch = json.loads((self.state_dir / ".session/launch.json").read_text())
        record = {"id": launch["id"], "session": launch["session"], "argv": launch["argv"], "pid": self.pid}
        record.update(boot_id=processes.boot_id(), pid_start=processes.start_ticks(self.pid), child_pid=self.pid)
        record.update(started=1.0, ended=None, exit_code=None, signal=None, stopped=False)
        (self.state_dir / "session.json").write_text(json.dumps(record))

    def finish(self):
        record = json.loads((self.state_dir / "session.json").read_text())
        (self.state_dir / "session.json").write_text(json.dumps({**record, "ended": 2.0, "exit_code": 3}))

    @staticmethod
    def name(words):
        return words[words.index("-t") + 1].lstrip("=").rstrip(":")


@pytest.fixture
def host(monkeypatch, tmp_path):
    monkeypatch.setattr(session_utils, "_GO_SECONDS", 0.1)
    runner = subprocess.Popen(["sleep", "600"])
    made = Host(tmp_path, runner.pid)
    monkeypatch.setattr(bare, "find", made.find)
    monkeypatch.setattr(bare, "run", made.run)
    yield made
    runner.kill()
    runner.wait()


@pytest.fixture
def play(run_module, host, tmp_path):
    def run(_check_mode=False, **options):
        given = {"name": "job", "state_dir": str(tmp_path), "argv": ["/bin/true", "a b"], **options}
        return run_module(tmux_session, _check_mode=_check_mode, **given)

    return run


def started_with(host):
    """The words of the one start that tmux was asked for."""
    (argv,) = [argv for argv in host.calls if "new-session" in argv]
    return argv


def test_starts_a_session_that_runs_the_script(play, host, tmp_path):
    result = play()

    assert result["changed"] and result["action"] == "start"
    assert result["session"]["state"] == "running" and result["session"]["argv"] == ["/bin/true", "a b"]
    argv = started_with(host)
    assert argv[:6] == ["/usr/bin/tmux", "new-session", "-d", "-s", "job", "-x"]
    assert argv[argv.index(";") - 1] == str(tmp_path / ".session")
    assert (tmp_path / "run.sh").read_text() == (
        f"#!/bin/sh\n# What the tmux session job runs; by hand: sh run.sh\ncd {tmp_path} || exit 1\n"
        "exec /bin/true \\\n  'a b'\n"
    )
    launch = tmp_path / ".session/launch.json"
    assert launch.stat().st_mode & 0o777 == 0o600


def test_a_session_that_ends_while_it_is_taken_out_of_tmux_is_no_failure(play, host, tmp_path, monkeypatch):
    play()
    host.finish()

    def gone_meanwhile(words):
        host.sessions.pop(host.name(words))
        return 1, "", "can't find session: job"

    monkeypatch.setattr(host, "kill_session", gone_meanwhile)
    assert play(argv=["/bin/false"])["action"] == "start"

    # One that stays is told of.
    host.finish()
    monkeypatch.setattr(host, "kill_session", lambda words: (1, "", "server exited unexpectedly"))
    assert "server exited unexpectedly" in play(argv=["/bin/true"])["msg"]


def test_check_mode_tells_the_same_and_does_nothing(play, host, tmp_path):
    checked = play(_check_mode=True)
    assert not list(tmp_path.iterdir()) and not host.sessions

    done = play()
    assert checked["changed"] and checked["action"] == done["action"] and checked["diff"] == done["diff"]
    assert checked["diff"]["before"] == "state: absent\n"
    assert checked["diff"]["after"].startswith("state: running\n")
    assert "argv:\n  /bin/true\n  'a b'\n" in checked["diff"]["after"]


def test_check_mode_on_a_bare_host_needs_neither_folder_nor_environment(play, tmp_path):
    result = play(_check_mode=True, state_dir=str(tmp_path / "no"), env_file=str(tmp_path / "env"), argv=["/no/python"])

    assert result["changed"] and result["session"] == {"state": "absent"}


@pytest.mark.parametrize(
    "options, action",
    [
        ({}, "none"),
        ({"rerun": True}, "start"),
        ({"argv": ["/bin/false"]}, "start"),
        ({"chdir": "/"}, "start"),
        ({"state": "restarted"}, "start"),
        ({"state": "stopped"}, "none"),
        ({"state": "absent"}, "remove"),
        ({"name": "other"}, "start"),
    ],
)
def test_what_is_done_with_a_session_that_has_ended(play, host, options, action):
    play()
    host.finish()

    result = play(_check_mode=True, **options)

    assert (result["action"], result["changed"]) == (action, action != "none")
    assert result["session"]["state"] == "finished" and result["session"]["exit_code"] == 3


def test_the_environments_values_are_never_shown(play, tmp_path):
    env = tmp_path / "env"
    env.write_text("KEY='correct-horse'\n")
    before = play(env_file=str(env))
    env.write_text("KEY='battery-staple'\n")
    after = play(env_file=str(env), _check_mode=True)

    assert before["diff"]["after"].endswith("env:\n  KEY\n")
    assert after["action"] == "restart" and after["diff"]["after"].endswith("env:\n  KEY (changed)\n")
    everything = f"{before} {after} {(tmp_path / '.session/launch.json').read_text()}"
    assert "correct-horse" not in everything and "battery-staple" not in everything


@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"pid_start": 1}], ids=["booted since", "pid taken since"])
def test_the_pid_of_a_record_that_belongs_to_another_by_now_is_not_touched(play, host, tmp_path, changed):
    play()
    record = json.loads((tmp_path / "session.json").read_text())
    (tmp_path / "session.json").write_text(json.dumps({**record, **changed}))

    stopped = play(state="stopped")

    assert not stopped["changed"] and stopped["session"]["state"] == "gone"
    assert play()["action"] == "start"
    assert processes.alive(host.pid, None)


@pytest.mark.parametrize("name", ["a.b", "a:b", "", "-a", "=a", "a b", "a\n", "ü"])
def test_refuses_names_that_tmux_would_read_otherwise(play, name):
    result = play(name=name)

    assert result["failed"] and f"{name!r} is not a session name" in result["msg"]


@pytest.mark.parametrize("state", ["started", "restarted"])
def test_a_missing_tmux_is_said_before_anything_is_written(play, host, tmp_path, state):
    host.installed.clear()

    for check in (True, False):
        result = play(_check_mode=check, state=state)
        assert result["failed"] and result["msg"] == "tmux is not installed on this host; install the package tmux"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", ["stopped", "absent"])
def test_nothing_to_stop_needs_no_tmux_and_no_folder(play, host, tmp_path, state):
    host.installed.clear()

    result = play(state=state, state_dir=str(tmp_path / "no"))

    assert not result["changed"] and result["session"] == {"state": "absent"}
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"argv": []}, "argv must begin with a program, not with nothing"),
        ({"argv": ["-c"]}, "argv must begin with a program, not with '-c'"),
        ({"argv": ["/no/python"]}, "/no/python does not exist or cannot be executed"),
        ({"chdir": "/no"}, "its folder /no does not exist"),
        ({"env_file": "/no/env"}, "its environment file /no/env does not exist"),
        ({"log": "/proc/no/log"}, "cannot write /proc/no"),
    ],
)
def test_refuses_what_cannot_run(play, host, options, words):
    result = play(**options)

    assert result["failed"] and words in result["msg"] and "session job" in result["msg"]
    assert not host.sessions


def test_a_word_that_no_program_could_get_is_named(play, host):
    result = play(argv=["a", "b\0"])
    assert result["failed"] and "argv[1] contains a NUL byte" in result["msg"] and not host.sessions


def test_tmuxs_own_words_are_passed_on(play, host):
    host.refuses = "create window failed: fork failed: Resource temporarily unavailable\n"

    result = play()

    assert result["failed"]
    assert result["msg"].startswith(
        "session job: `/usr/bin/tmux new-session -d -s ...` failed: create window failed: fork"
    )


def test_a_runner_that_does_not_come_up_is_shown(play, host, monkeypatch):
    monkeypatch.setattr(session_utils, "_START_SECONDS", 0.1)
    host.silent = True

    result = play()

    assert result["failed"] and "its pane shows: Traceback: no such thing" in result["msg"]


def test_a_session_of_somebody_else_is_not_replaced(play, host):
    host.sessions["job"] = ""

    result = play()

    assert result["failed"] and "tmux already has a session job that nanochat.ddp did not start" in result["msg"]
    assert host.sessions == {"job": ""}


def test_of_an_older_name_nothing_stays_behind(play, host):
    play()
    host.finish()
    play(name="later")
    assert set(host.sessions) == {"later"}


@pytest.mark.parametrize(
    "kills, lingers, in_login, warned, scoped",
    [
        ("no", "no", True, False, False),
        ("yes", "no", True, True, False),
        ("yes", "yes", False, False, True),
        ("yes", "yes", True, True, True),  # an older tmux server, started from the login itself, took the session in
    ],
)
def test_field_12_logging_out_where_systemd_kills(
    play, host, monkeypatch, warnings, kills, lingers, in_login, warned, scoped
):
    host.installed |= {"loginctl", "systemd-run"}
    host.logind = f"KillUserProcesses={kills}\nKillExcludeUsers=\nLinger={lingers}\n"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setattr(session_utils.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(tmux_utils, "ends_with_login", lambda pid: in_login)

    play()

    assert len(warnings) == warned
    assert not warned or "loginctl enable-linger" in warnings[0]
    assert (started_with(host)[0] == "/usr/bin/systemd-run") == scoped


def test_whoever_cannot_be_ended_is_named(play, host, monkeypatch):
    play()
    stubborn = processes.process(host.pid)
    monkeypatch.setattr(session_utils.reaper, "end", lambda session, grace: {stubborn.pid: stubborn})

    for state in ("stopped", "absent", "restarted"):
        result = play(state=state)
        assert result["failed"]
        assert f"these processes are still alive after SIGKILL: {host.pid} (sleep 600)" in result["msg"]
    assert set(host.sessions) == {"job"}


def test_a_play_inside_the_session_does_not_stop_itself(play, host):
    play()
    host.pid = os.getpid()
    host.write_record()

    result = play(state="stopped")

    assert result["failed"] and "runs inside the session" in result["msg"]


def test_root_is_excluded_from_the_killing_by_default():
    def run(argv):
        return 0, "KillUserProcesses=yes\nKillExcludeUsers=root\nLinger=no\n", ""

    assert not logind(run, "root").kills
    assert logind(run, "lzw").kills
    assert logind(lambda argv: (127, "", "not installed"), "lzw") == (False, False)


def test_a_tmux_server_that_is_just_ending_is_asked_again_and_not_for_ever():
    answers = iter([(1, "", "server exited unexpectedly"), (0, "", "")])
    tmux_utils.Tmux(lambda argv: next(answers), "tmux").start("job", "label", "/a", ["true"])
    assert not list(answers)

    with pytest.raises(tmux_utils.TmuxError, match="server exited"):
        tmux_utils.Tmux(lambda argv: (1, "", "server exited unexpectedly"), "tmux").start("job", "l", "/a", ["true"])


def test_a_tmux_server_of_another_release_is_named():
    tmux = tmux_utils.Tmux(lambda argv: (1, "", "protocol version mismatch (client 8, server 7)"), "/opt/tmux")

    with pytest.raises(tmux_utils.TmuxError, match="does not understand /opt/tmux: protocol version mismatch"):
        tmux.exists("job")
