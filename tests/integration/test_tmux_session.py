# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module tmux_session on a real tmux server, which is this test's own (TMUX_TMPDIR)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.logind import Logind, logind
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot, reaper, runner
from ansible_collections.nanochat.ddp.plugins.module_utils._session import session as session_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tmux as tmux_utils
from ansible_collections.nanochat.ddp.plugins.modules import tmux_session
from ansible_collections.nanochat.ddp.tests.integration.local import until

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")

SLEEP = "import time; time.sleep(600)"
ASLEEP = [sys.executable, "-c", SLEEP]
ARGV = ["/bin/true", "a b"]
# Logs its pid for the tests.
SAY = "import os; os.write(1, b'%d\\n' % os.getpid())\n"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def living(pid):
    found = processes.process(pid)
    return found is not None and found.state != "Z"


def tmux(*words):
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)


class Job:
    """One session of a test."""

    def __init__(self, run_module, folder, name="job-1"):
        self._run_module = run_module
        self.name = name
        self.folder = folder
        self.log = folder / "log" / f"{name}.log"

    def play(self, state="started", check=False, **options):
        options.setdefault("stop_timeout", 2)
        return self._run_module(
            tmux_session, _check_mode=check, name=self.name, state_dir=str(self.folder), state=state, **options
        )

    def start(self, program, *words, **options):
        result = self.play(argv=[sys.executable, "-c", program, *words], **options)
        assert "failed" not in result, result["msg"]
        return result

    def record(self):
        try:
            return json.loads((self.folder / "session.json").read_text())
        except OSError:
            return {}

    def lines(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def pids(self, count):
        """The pids that the first lines of the log hold."""
        return [int(line) for line in until(lambda: len(self.lines()) >= count and self.lines())[:count]]

    def ended(self):
        until(lambda: self.record().get("ended"))
        return self.record()


@pytest.fixture
def server(monkeypatch):
    """A tmux server of our own, with a short path for its socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMUX_TMPDIR", folder)
        monkeypatch.delenv("TERM", raising=False)
        monkeypatch.delenv("TMUX", raising=False)
        yield folder
        tmux("kill-server")


@pytest.fixture
def jobs(run_module, server, tmp_path):
    made = []

    def make(name="job-1"):
        made.append(Job(run_module, tmp_path / name, name))
        return made[-1]

    yield make
    for job in made:
        if job.folder.exists():
            assert "failed" not in job.play("absent", stop_timeout=0)


@pytest.fixture
def job(jobs):
    return jobs()


@pytest.fixture
def strangers():
    """Starts processes that are none of the session's business, and ends them by their pids."""
    started = []

    def start(argv, **options):
        started.append(subprocess.Popen(argv, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


# -- from start to end ------------------------------------------------------------------------------------------------


def test_starts_once_with_a_record_that_keeps_to_the_contract(job):
    session = job.start(SAY + SLEEP)["session"]

    assert session["session"] == job.name
    assert session["boot_id"] == processes.boot_id()
    assert session["pid_start"] == processes.start_ticks(session["pid"])
    assert job.pids(1) == [session["child_pid"]]
    assert processes.process(session["child_pid"]).marker == session["id"]
    assert [session[key] for key in ("ended", "exit_code", "signal", "stopped")] == [None, None, None, False]
    assert {**job.record(), "state": "running"} == session
    again = job.start(SAY + SLEEP)
    assert not again["changed"] and again["session"]["id"] == session["id"]


@pytest.mark.parametrize(
    "program, revive, code, number",
    [
        ("raise SystemExit(0)", True, 0, None),
        ("raise SystemExit(7)", True, 7, None),
        ("import os; os.kill(os.getpid(), 9)", False, None, 9),
    ],
)
def test_field_14_the_exit_code_is_recorded_and_what_ended_by_itself_is_not_revived(job, program, revive, code, number):
    job.start(program, revive=revive)
    ended = job.ended()

    assert (ended["exit_code"], ended["signal"], ended["stopped"], ended["revived"]) == (code, number, False, 0)
    assert ended["ended"] >= ended["started"]
    assert job.play("stopped")["session"]["state"] == "finished"


def test_an_ended_session_stays_readable_and_is_left_alone(job):
    job.start("print('the end')")
    ended = job.ended()

    again = job.start("print('the end')")
    assert not again["changed"] and again["session"] == {**ended, "state": "finished"}
    shown = until(
        lambda: (
            (pane := tmux("capture-pane", "-p", "-S", "-", "-t", "=job-1:").stdout) and "ended with" in pane and pane
        )
    )
    assert "the end" in shown and "[job-1 ended with code 0" in shown

    for options, action in (
        ({}, "none"),
        ({"rerun": True}, "start"),
        ({"argv": ["/bin/false"]}, "start"),
        ({"chdir": "/"}, "start"),
        ({"state": "restarted"}, "start"),
        ({"state": "stopped"}, "none"),
        ({"state": "absent"}, "remove"),
    ):
        result = job.play(check=True, **{"argv": [sys.executable, "-c", "print('the end')"], **options})
        assert (result["action"], result["changed"]) == (action, action != "none"), options
        assert result["session"]["state"] == "finished" and result["session"]["exit_code"] == 0

    rerun = job.start("print('the end')", rerun=True)
    assert rerun["changed"] and rerun["session"]["id"] != ended["id"]
    until(lambda: job.record().get("ended"))
    assert job.lines() == ["the end"] * 2
    # Under another name it is started, and nothing of the older one stays behind.
    job.name = "later"
    assert job.play(argv=ARGV)["action"] == "start"
    assert tmux("has-session", "-t", "=job-1").returncode == 1


def test_field_13_output_is_logged_line_by_line_while_it_runs(job, tmp_path):
    go = tmp_path / "go"
    job.start(
        "import os, sys, time\n"
        "print('out'); print('err', file=sys.stderr); print('part', end='')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print(' whole')"
    )
    until(lambda: job.log.exists() and job.log.read_text() == "out\nerr\npart")
    go.touch()
    job.ended()

    assert job.log.read_text() == "out\nerr\npart whole\n"


@pytest.mark.parametrize(("polite", "policy"), [("guest", os.SCHED_IDLE), ("off", os.SCHED_OTHER)])
def test_a_polite_program_yields_to_others_and_its_runner_does_not(job, tmp_path, polite, policy):
    env = tmp_path / "polite.env"
    env.write_bytes(env_file_utils.render({"NANOCHAT_POLITE": polite}))
    runner = job.start(SLEEP, "polite", env_file=str(env))["session"]["pid"]
    children = Path(f"/proc/{runner}/task/{runner}/children")
    until(lambda: [os.sched_getscheduler(int(pid)) for pid in children.read_text().split()] == [policy])
    assert os.sched_getscheduler(runner) == os.SCHED_OTHER
    child = children.read_text().strip()
    niceness, killed_first = (
        os.getpriority(os.PRIO_PROCESS, int(child)),
        Path(f"/proc/{child}/oom_score_adj").read_text(),
    )
    assert polite == "off" or (niceness, killed_first) == (19, "1000\n")


def test_a_clock_that_is_set_back_makes_a_session_no_younger_than_what_it_writes(tmp_path, monkeypatch):
    given = {"argv": ["/bin/true"], "chdir": "/", "env_file": None, "log": str(tmp_path / "log"), "env": {}}
    (tmp_path / ".session").mkdir()
    (tmp_path / ".session/launch.json").write_text(json.dumps({"id": "1", "session": "job-1", "given": given}))
    one = runner.Runner(str(tmp_path / ".session"))
    # A battery or another system has left the machine's clock hours ahead, until it asks others for the time.
    one.state["started"] += 8 * 3600
    monkeypatch.setattr(one, "_reap", lambda: setattr(one, "code", 0))
    one._follow(SimpleNamespace())
    assert json.loads((tmp_path / "session.json").read_text())["started"] <= time.time()


def test_without_rights_to_yield_nothing_fails(tmp_path):
    code = "import os\ndef refuse(*dummy): raise PermissionError\nos.sched_setscheduler = refuse\n"
    code += f"from {runner.__name__} import yield_to_others as polite\npolite({str(tmp_path)!r})\nprint(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "19\n"


def test_absent_takes_the_pane_and_the_record_and_leaves_the_log(job):
    job.start("print('hello')")
    job.ended()
    assert job.play("absent", check=True)["changed"] and tmux("has-session", "-t", "=job-1").returncode == 0

    assert job.play("absent")["session"] == {"state": "absent"}
    assert tmux("has-session", "-t", "=job-1").returncode == 1
    assert sorted(entry.name for entry in job.folder.iterdir()) == ["log", "run.sh"]
    assert not job.play("absent")["changed"]


def test_the_pane_of_an_ended_run_goes_with_its_folder_whatever_that_is_called(jobs, tmp_path, monkeypatch):
    # By default ssh passes no locale, and then tmux prints no such letter.
    monkeypatch.setenv("LC_ALL", "C")
    job = jobs("josé")
    job.name = "job-1"
    job.start("print('hello')")
    job.ended()
    boot.end_sessions([str(tmp_path), str(job.folder)])
    assert tmux("has-session", "-t", "=job-1").returncode == 1


# -- what reaches the program -----------------------------------------------------------------------------------------


def test_field_11_every_argument_arrives_as_it_is_and_nothing_of_an_older_tmux_server(job, tmp_path, monkeypatch):
    words = ["", " ", "it's", '"', "$HOME", "`id`", "a\nb\n", "\\", "*", "~", ";", "a;", "#{pid}", "-x", "\x01\x7f", "ü", "=x"]  # fmt: skip
    chdir = tmp_path / "a 'folder' for $5;"
    chdir.mkdir()
    program = "import os, sys; print(ascii([sys.argv[1:], os.getcwd()])); print(sorted(os.environ))"
    with monkeypatch.context() as polluted:
        polluted.setenv("NANOCHAT_DATA_DIR", "/elsewhere")
        polluted.setenv("PYTHONPATH", "/elsewhere")
        subprocess.run(["tmux", "new-session", "-d", "-s", "older", "sleep 600"], check=True)

    job.start(program, *words, chdir=str(chdir))
    assert job.ended()["exit_code"] == 0

    arrived, environment = job.lines()
    assert arrived == ascii([words, str(chdir)])
    expected = {"HOME", "LANG", "LOGNAME", "PATH", "PYTHONUNBUFFERED", "SHELL", "USER", "NANOCHAT_DDP_SESSION"}
    assert set(eval(environment)) - {"PWD", "OLDPWD", "LC_CTYPE"} == expected
    by_hand = subprocess.run(["sh", job.folder / "run.sh"], capture_output=True, text=True, check=True)
    assert by_hand.stdout.splitlines()[0] == arrived


def test_a_full_disk_does_not_stop_the_program(job, tmp_path):
    job.start("print('x' * 100000); print('y'); raise SystemExit(3)", log="/dev/full")

    assert job.ended()["exit_code"] == 3


@pytest.fixture
def full_disk(tmp_path):
    """Puts the job's folder on a disk of its own; `fill()` leaves no byte of it, and `fill(files=True)` no room for another file."""
    folder = tmp_path / "job-1"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k,nr_inodes=40,mode=0755", "tmpfs", folder], check=True)

    def fill(files=False):
        for number in range(40 if files else 1):
            with contextlib.suppress(OSError), (folder / f"filler-{number}").open("wb", buffering=0) as file:
                while number == 0:
                    file.write(b"x" * 512)
        with pytest.raises(OSError, match="No space left"):
            (folder / "filler-0").open("ab", buffering=0).write(b"x" * 4096)

    yield fill
    subprocess.run(["umount", "-l", folder], check=True)


# A keeper, which its session starts again after this code; its rank gets no signal that it handles.
KEEPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *dummy: sys.exit(75))
signal.signal(signal.SIGINT, lambda *dummy: sys.exit(0))
while not os.path.exists(".session/stop"): time.sleep(0.05)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("files", [False, True])
def test_a_full_disk_can_be_stopped_restarted_and_cleaned(files, full_disk, job, warnings):
    given = {"argv": [sys.executable, "-c", KEEPER], "revive": True, "stop_timeout": 20}
    session = job.play(**given)["session"]
    full_disk(files)
    stopped = job.play("stopped", stop_timeout=20)
    assert stopped["changed"] and not living(session["pid"]) and not living(session["child_pid"])
    assert job.record()["stopped"] and not warnings
    # Without its record, only an empty file says so after a reboot.
    again = job.play("restarted", **given)
    assert again["session"]["state"] == "running", again
    job.play("restarted", **given)
    assert job.play("absent")["changed"] and not (job.folder / "session.json").exists()


def test_the_unit_for_a_reboot_starts_the_session_after_a_power_cut(job, tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("systemctl", "loginctl", "crontab"):
        (tools / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    started = job.start(SAY + SLEEP, revive=True, at_boot=True)
    session = started["session"]
    (unit,) = (tmp_path / ".config/systemd/user").glob("*.service")
    command = unit.read_text().rpartition("ExecStart=")[2]
    subprocess.run(["sh", "-c", command], check=True, cwd="/")
    assert job.record()["pid"] == session["pid"], "it runs"
    pids = (session["pid"], *job.pids(1))
    tmux("kill-server")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(living, pids)))
    (job.folder / "session.json").write_text(json.dumps({**session, "boot_id": "before"}))
    subprocess.run(["sh", "-c", command], check=True, cwd="/")
    until(lambda: job.record().get("pid") not in (None, session["pid"]))
    assert job.play("started", argv=[sys.executable, "-c", SAY + SLEEP], revive=True)["session"]["state"] == "running"
    assert living(until(lambda: job.record().get("child_pid")))


# -- how it is stopped ------------------------------------------------------------------------------------------------


# A tree with a child that ignores SIGTERM, a grandchild in a session of its own, one that left its parents, and one
# that is stopped.
TREE = (
    "import os, signal, subprocess, sys, time\n"
    f"ignore, say = {IGNORE!r}, {SAY!r}\n"
    "sleep = 'import time; time.sleep(600)'\n"
    "python = [sys.executable, '-c']\n"
    "subprocess.Popen(python + [ignore + say + sleep])\n"
    "subprocess.Popen(python + [ignore + say + sleep], start_new_session=True)\n"
    "subprocess.run(python + [f'import subprocess; subprocess.Popen({python + [say + sleep]}, start_new_session=True)'])\n"
    "stopped = subprocess.Popen(python + [say + sleep])\n"
    f"{SAY}{SLEEP}\n"
)


@pytest.mark.parametrize("runner", ["alive", "killed", "killed, and its record lost"])
def test_stop_ends_the_whole_tree(job, monkeypatch, runner):
    monkeypatch.setattr(reaper, "TERM_SECONDS", 0.5)
    session = job.start(TREE)["session"]
    pids = job.pids(5)
    os.kill(pids[-1], signal.SIGSTOP)
    if runner != "alive":
        os.kill(session["pid"], signal.SIGKILL)
        until(lambda: not living(session["pid"]))
    if "lost" in runner:
        (job.folder / "session.json").unlink()

    assert job.play("stopped", check=True)["changed"]
    assert all(living(pid) for pid in pids)
    result = job.play("stopped", stop_timeout=1)

    assert result["changed"] and result["session"]["state"] == ("finished" if runner == "alive" else "gone")
    assert not [pid for pid in (*pids, session["pid"]) if living(pid)]
    assert "lost" in runner or result["session"]["stopped"]
    assert not job.play("stopped")["changed"]


def test_field_06_what_the_program_leaves_behind_ends_with_it(job):
    """An orphan that held the port used to keep the next run from starting."""
    orphan = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{SAY}{SLEEP}"
    parent = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)\n"
        "time.sleep(1); raise SystemExit(5)"
    )
    job.start(parent, orphan)
    (pid,) = job.pids(1)
    assert job.ended()["exit_code"] == 5 and not living(pid)


def test_nobody_else_is_ever_touched(jobs, strangers, monkeypatch):
    monkeypatch.setattr(reaper, "TERM_SECONDS", 0.5)
    job, neighbour = jobs(), jobs("job-10")
    neighbour.start(IGNORE + SAY + SLEEP)
    assert not job.play("absent")["changed"], "names match exactly"
    session = job.start(IGNORE + SAY + SLEEP)["session"]
    marked = {**os.environ, "NANOCHAT_DDP_SESSION": neighbour.record()["id"] + "0"}
    alike = [sys.executable, "-c", IGNORE + SAY + SLEEP]
    others = [strangers(alike), strangers(alike, env=marked), strangers(alike, cwd=job.folder, start_new_session=True)]
    if os.getuid() == 0:
        # Another user's, even if it claims to be of the session.
        claim = {"NANOCHAT_DDP_SESSION": session["id"]}
        others.append(strangers(["sleep", "600"], env=claim, user=65534, cwd="/"))
    job.pids(1)
    neighbour.pids(1)

    # Once the gentle way, once with the runner gone.
    job.play("stopped", stop_timeout=1)
    again = job.start(IGNORE + SAY + SLEEP, rerun=True)["session"]
    until(lambda: len(job.lines()) == 2)
    os.kill(again["pid"], signal.SIGKILL)
    job.play("absent", stop_timeout=0)

    assert not living(session["child_pid"]) and not living(again["child_pid"])
    assert [other.poll() for other in others] == [None] * len(others)
    assert neighbour.play("stopped", check=True)["session"]["state"] == "running"
    assert living(neighbour.record()["child_pid"])


SAVE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *dummy: (time.sleep(1), print('saved', flush=True), sys.exit(0)))\n"
    "print('ready', flush=True)\n" + SLEEP
)


@pytest.mark.parametrize(
    "how, stopped, terminated",
    [("Ctrl-C", True, None), ("shutdown", False, "SIGTERM"), ("kill-session", False, "SIGHUP")],
)
def test_whoever_ends_it_lets_the_program_save_and_only_ctrl_c_is_a_users_stop(job, how, stopped, terminated):
    session = job.start(SAVE, stop_timeout=20)["session"]
    until(lambda: job.lines() == ["ready"])
    if how == "Ctrl-C":
        tmux("send-keys", "-t", "=job-1:", "C-c")
    elif how == "kill-session":
        tmux("kill-session", "-t", "=job-1")
    else:
        # As systemd does it; the second one hurries nobody.
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(session["pid"], number)

    ended = job.ended()
    assert (ended["exit_code"], ended["stopped"], ended["terminated_by"]) == (0, stopped, terminated)
    assert job.lines() == ["ready", "saved"]
    assert stopped or not (job.folder / ".session/stop").exists()


# -- a program that dies ----------------------------------------------------------------------------------------------


def test_a_program_that_dies_is_started_again_where_that_is_wanted(job):
    orphan = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {SAY + SLEEP!r}]); time.sleep(1)"
    program = (
        "import time\nif os.path.exists('died'): print('again', flush=True); time.sleep(600)\n"
        "open('died', 'w'); os.kill(os.getpid(), 9)"
    )
    job.start(f"{orphan.replace('import', 'import time,', 1)}\n{program}", revive=True)
    until(lambda: "again" in job.lines())

    record = job.record()
    assert (record["revived"], record["ended"], record["stopped"]) == (1, None, False)
    assert record["died_of"] == "signal 9"
    assert any(line.startswith("session: job-1 died of signal 9; restarting") for line in job.lines())
    # What the first one left behind is gone.
    first, second = [int(line) for line in job.lines() if line.isdigit()]
    assert not living(first) and living(second)
    assert job.play("stopped")["session"]["ended"] is not None
    assert (job.record()["stopped"], job.record()["revived"]) == (True, 1)


def test_a_program_that_dies_again_and_again_is_started_ever_more_slowly_until_it_is_stopped(job):
    job.start("print('tried', flush=True); raise SystemExit(75)", revive=True)
    until(lambda: job.lines().count("tried") >= 3)
    waits = [line.rsplit("in ", 1)[1] for line in job.lines() if "restarting" in line]
    assert waits[:2] == ["1 s", "2 s"] and job.record()["died_of"] == "code 75"
    assert job.play("stopped")["session"]["stopped"]
    tried = job.lines().count("tried")
    assert job.ended()["exit_code"] == 75
    assert job.lines().count("tried") == tried


def test_a_pane_that_was_frozen_does_not_freeze_the_program(job):
    go = job.folder / "go"
    job.start(
        f"import os, time\nprint('ready')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "for number in range(20000): print('x' * 100)"
    )
    until(lambda: job.lines() == ["ready"])
    tmux("send-keys", "-t", "=job-1:", "C-s")
    go.touch()

    assert job.ended()["exit_code"] == 0
    assert len(job.lines()) == 20001


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_two_folders_do_not_share_a_name_while_one_runs(jobs):
    first, second = jobs(), jobs()
    second.folder = second.folder.with_name("it's; #{another}")
    second.log = second.folder / "log" / f"{second.name}.log"
    first.start(SLEEP)
    refused = second.play(argv=["true"])
    assert refused["failed"] and f"which is not of {second.folder} and runs {sys.executable}" in refused["msg"]
    assert f"{first.folder}/.session: end it" in refused["msg"]

    first.play("stopped")
    second.start(SLEEP)
    assert first.play("absent")["session"] == {"state": "absent"}
    assert "another" in first.play(argv=["true"])["msg"]
    assert second.play("stopped", check=True)["session"]["state"] == "running"


def test_two_controllers_at_once_start_one_session(job):
    options = {"name": job.name, "state_dir": str(job.folder), "argv": [sys.executable, "-c", SAY + SLEEP]}
    program = f"import json\nfrom {session_utils.__name__} import tmux_session\nprint(json.dumps(tmux_session(**{options!r})))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for dummy in range(2)]
    results = [json.loads(one.communicate()[0]) for one in both]

    assert sorted(result["changed"] for result in results) == [False, True]
    assert results[0]["session"]["id"] == results[1]["session"]["id"]
    assert len(job.pids(1)) == 1


# -- what it predicts, shows and refuses --------------------------------------------------------------------------------


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
        ({"argv": ["a", "b\0"]}, "an argument of argv contains a NUL byte"),
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
    # The server ends with its last session.
    until(lambda: tmux("new-session", "-d", "-s", "job-1", "sleep 600").returncode == 0)
    result = job.play(argv=ARGV)
    assert result["failed"] and f"session job-1, which is not of {job.folder} and runs sleep 600" in result["msg"]
    assert tmux("list-panes", "-t", "=job-1", "-F", "#{pane_dead}").stdout == "0\n"
    # Nor one whose program has ended.
    tmux("set-option", "-w", "-t", "=job-1:", "remain-on-exit", "on")
    tmux("respawn-pane", "-k", "-t", "=job-1:", "true")
    until(lambda: tmux("list-panes", "-t", "=job-1", "-F", "#{pane_dead}").stdout == "1\n")
    assert "and runs true: end it" in job.play(argv=ARGV)["msg"]


@pytest.mark.parametrize(
    "kills, lingers, scoped",
    [(False, False, False), (True, False, False), (True, True, True)],  # preflight warns of the second
)
def test_field_12_logging_out_where_systemd_kills(job, tmp_path, monkeypatch, kills, lingers, scoped):
    program, scope = tmp_path / "systemd-run", tmp_path / "scope"
    program.write_text(f'#!/bin/sh\necho "$@" >{scope}\nshift 4\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(session_utils, "logind", lambda user: Logind(kills, lingers))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert job.play(argv=ASLEEP)["changed"]

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
    answers(ENDING, (0, "", "")).start("job", "/a")
    answers((1, "", "can't find session: job")).kill("job")
    with pytest.raises(tmux_utils.TmuxError, match="server exited"):
        answers(ENDING).start("job", "/a")
    with pytest.raises(tmux_utils.TmuxError, match="server exited unexpectedly"):
        answers(*[ENDING] * 5, (0, "", "")).kill("job")


def test_tmuxs_own_words_are_passed_on(answers):
    with pytest.raises(
        tmux_utils.TmuxError, match=r"session job: `/opt/tmux new-session -d -s \.\.\.` failed: no fork"
    ):
        answers((1, "", "no fork\n")).start("job", "/a")
    with pytest.raises(tmux_utils.TmuxError, match="does not understand /opt/tmux: protocol version mismatch"):
        answers((1, "", "protocol version mismatch (client 8, server 7)")).look("job")
