# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sessions on a real tmux server, which is this test's own (TMUX_TMPDIR)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._session import reaper
from ansible_collections.nanochat.ddp.plugins.modules import tmux_session
from ansible_collections.nanochat.ddp.tests.integration.test_env_file import ENVIRONMENTS, environment_of
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")

SLEEP = "import time; time.sleep(600)"
# Says in its log who it is, for the tests to look after.
SAY = "import os; os.write(1, b'%d\\n' % os.getpid())\n"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def until(condition, seconds=60.0):
    """Poll until the condition holds and return what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} seconds: {condition}")


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


def test_starts_once_and_tells_so_in_check_mode(job):
    program = "print('hello', flush=True); " + SLEEP
    checked = job.start(program, check=True)
    assert checked["changed"] and checked["session"] == {"state": "absent"}
    assert not job.folder.exists()

    done = job.start(program)
    assert done["changed"] and done["diff"] == checked["diff"]
    assert done["session"]["state"] == "running"
    until(lambda: job.lines() == ["hello"])

    again = job.start(program)
    assert not again["changed"] and again["session"]["id"] == done["session"]["id"]
    assert again["diff"]["before"] == again["diff"]["after"]


def test_the_record_keeps_to_the_contract(job):
    session = job.start(SAY + SLEEP)["session"]

    assert session["argv"] == [sys.executable, "-c", SAY + SLEEP]
    assert session["session"] == job.name
    assert session["boot_id"] == processes.boot_id()
    assert session["pid_start"] == processes.start_ticks(session["pid"])
    assert job.pids(1) == [session["child_pid"]]
    assert processes.process(session["child_pid"]).marker == session["id"]
    assert [session[key] for key in ("ended", "exit_code", "signal", "stopped")] == [None, None, None, False]
    assert {**job.record(), "state": "running"} == session


@pytest.mark.parametrize(
    "program, code, number",
    [
        ("raise SystemExit(0)", 0, None),
        ("raise SystemExit(7)", 7, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
    ],
)
def test_field_14_the_exit_code_is_recorded(job, program, code, number):
    job.start(program)
    ended = job.ended()

    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (code, number, False)
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

    rerun = job.start("print('the end')", rerun=True)
    assert rerun["changed"] and rerun["session"]["id"] != ended["id"]
    until(lambda: job.lines() == ["the end"] * 2)


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


def test_a_progress_bar_that_never_ends_its_line_is_logged_too(job):
    job.start("import time\nwhile True: print('.', end='', flush=True); time.sleep(0.01)")

    until(lambda: job.lines() and len(job.lines()[0]) > 20)


def test_other_arguments_restart_it_and_the_diff_says_so(job, tmp_path):
    env = tmp_path / "env"
    env.write_bytes(env_file_utils.render({"A": "1", "B": "1"}))
    first = job.start(SLEEP, "one", env_file=str(env))["session"]
    env.write_bytes(env_file_utils.render({"A": "1", "B": "2", "C": "3"}))

    checked = job.start(SLEEP, "two", env_file=str(env), check=True)
    assert checked["action"] == "restart" and checked["session"]["id"] == first["id"]
    assert "  one\n" in checked["diff"]["before"] and "  two\n" in checked["diff"]["after"]
    assert checked["diff"]["after"].endswith("env:\n  A\n  B (changed)\n  C\n")

    second = job.start(SLEEP, "two", env_file=str(env))
    assert second["changed"] and second["session"]["id"] != first["id"]
    assert not living(first["child_pid"]) and until(lambda: living(job.record()["child_pid"]))


def test_restarted_always_starts_anew(job):
    argv = [sys.executable, "-c", SLEEP]
    first = job.play("restarted", argv=argv)
    second = job.play("restarted", argv=argv)

    assert first["action"] == "start" and second["action"] == "restart"
    assert not living(first["session"]["pid"]) and living(second["session"]["pid"])


def test_absent_takes_the_pane_and_the_record_and_leaves_the_log(job):
    job.start("print('hello')")
    job.ended()
    assert job.play("absent", check=True)["changed"] and tmux("has-session", "-t", "=job-1").returncode == 0

    assert job.play("absent")["session"] == {"state": "absent"}
    assert tmux("has-session", "-t", "=job-1").returncode == 1
    assert sorted(entry.name for entry in job.folder.iterdir()) == ["log", "run.sh"]
    assert not job.play("absent")["changed"]


# -- what reaches the program -----------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENVIRONMENTS)
def test_every_byte_of_the_environment_arrives_through_the_launch(job, tmp_path, env):
    path, out = tmp_path / "env", tmp_path / "out"
    path.write_bytes(env_file_utils.render({name: os.fsdecode(value) for name, value in env.items()}))
    dump = f"import os; open({str(out)!r}, 'wb').write(b''.join(b'%s=%s\\0' % pair for pair in os.environb.items()))"

    job.play("restarted", argv=[sys.executable, "-c", dump], env_file=str(path))
    assert job.ended()["exit_code"] == 0

    arrived = environment_of(out.read_bytes())
    assert {name: arrived.get(name) for name in env} == env


def test_field_11_every_argument_arrives_as_it_is(job, tmp_path):
    words = [
        "",
        " ",
        "it's",
        '"',
        "$HOME",
        "`id`",
        "a\nb\n",
        "\\",
        "*",
        "~",
        ";",
        "a;",
        "#{pid}",
        "-x",
        "\x01\x7f",
        "ü",
        "=x",
    ]
    chdir = tmp_path / "a 'folder' for $5;"
    chdir.mkdir()
    program = "import os, sys; print(ascii([sys.argv[1:], os.getcwd()]))"

    job.start(program, *words, chdir=str(chdir))
    assert job.ended()["exit_code"] == 0

    assert job.lines() == [ascii([words, str(chdir)])]
    by_hand = subprocess.run(["sh", job.folder / "run.sh"], capture_output=True, text=True, check=True)
    assert by_hand.stdout.splitlines() == job.lines()


def test_nothing_of_an_older_tmux_server_reaches_the_program(job, monkeypatch):
    with monkeypatch.context() as polluted:
        polluted.setenv("NANOCHAT_DATA_DIR", "/elsewhere")
        polluted.setenv("PYTHONPATH", "/elsewhere")
        subprocess.run(["tmux", "new-session", "-d", "-s", "older", "sleep 600"], check=True)

    job.start("import os; print(sorted(os.environ))")
    job.ended()

    expected = {"HOME", "LANG", "LOGNAME", "PATH", "PYTHONUNBUFFERED", "SHELL", "USER", "NANOCHAT_DDP_SESSION"}
    assert set(eval(job.lines()[0])) - {"PWD", "OLDPWD", "LC_CTYPE"} == expected


def test_a_full_disk_does_not_stop_the_program(job, tmp_path):
    job.start("print('x' * 100000); print('y'); raise SystemExit(3)", log="/dev/full")

    assert job.ended()["exit_code"] == 3


# -- what it survives -------------------------------------------------------------------------------------------------


def interpreters():
    """The Python of the system and the oldest that a host may have."""
    old = Path.home() / ".pyenv/versions/3.8.18/bin/python"
    return ["/usr/bin/python3"] + ([str(old)] if old.exists() else [])


def controller(job, *options):
    """Plays the module as Ansible does, and kills the controller's whole process group afterwards."""
    root = Path(__file__).parents[2]
    given = {"name": job.name, "state_dir": str(job.folder), "argv": [sys.executable, "-c", SLEEP]}
    surroundings = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=no",
    }
    process = subprocess.Popen(
        ["ansible", "all", "-m", "nanochat.ddp.tmux_session", "-a", json.dumps(given), *options],
        cwd=root,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    words = process.communicate()[0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGHUP)
    return words


@pytest.mark.parametrize("python", interpreters())
def test_field_12_a_second_controller_finds_what_the_first_has_started(job, python):
    options = ["-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={python}"]

    first, second = controller(job, *options), controller(job, *options)

    assert "CHANGED" in first and "SUCCESS" in second, first + second
    assert living(job.record()["pid"]) and living(job.record()["child_pid"])
    assert os.getsid(job.record()["pid"]) == job.record()["pid"]


@pytest.fixture
def sshd(tmp_path, server):
    """A real sshd on a port of its own; gives the words with which Ansible reaches this machine through it."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if os.getuid() or not Path(program).exists():
        pytest.skip("needs root and openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub", "StrictModes": "no"}
    settings.update(PidFile="none", UsePAM="no", PermitRootLogin="yes", SetEnv=f"TMUX_TMPDIR={server}")
    words = [f"-o{name}={value}" for name, value in settings.items()]
    process = subprocess.Popen([program, "-D", "-f", "/dev/null", "-p", str(port), "-oListenAddress=127.0.0.1", *words])
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    common = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    reached = {"ansible_port": port, "ansible_ssh_private_key_file": str(tmp_path / "user")}
    yield ["-i", "127.0.0.1,", "-e", json.dumps({**reached, "ansible_ssh_common_args": common})]
    process.terminate()
    process.wait()


def test_field_12_survives_the_ssh_connection(job, sshd):
    words = controller(job, *sshd, "-e", "ansible_python_interpreter=/usr/bin/python3")

    assert "CHANGED" in words, words
    # The controller has ended, and its connection with it.
    assert living(job.record()["pid"]) and living(job.record()["child_pid"])
    assert job.play("stopped", check=True)["session"]["state"] == "running"


def test_is_gone_after_the_host_was_restarted(job, strangers):
    job.start(SLEEP)
    record = job.record()
    job.play("stopped")
    # After a restart the pids of the record belong to others.
    other = strangers(["sleep", "600"])
    changed = {**record, "boot_id": "another", "pid": other.pid, "pid_start": processes.start_ticks(other.pid)}
    (job.folder / "session.json").write_text(json.dumps(changed))

    stopped = job.play("stopped")
    assert not stopped["changed"] and stopped["session"]["state"] == "gone"
    assert other.poll() is None
    assert job.start(SLEEP)["action"] == "start"
    assert other.poll() is None


def test_a_pid_that_was_taken_since_is_not_touched(job, strangers):
    job.start(SLEEP)
    job.play("stopped")
    other = strangers([sys.executable, "-c", SLEEP])
    start = processes.start_ticks(other.pid)
    taken = {**job.record(), "pid": other.pid, "pid_start": start - 1, "child_pid": other.pid, "ended": None}
    (job.folder / "session.json").write_text(json.dumps(taken))

    result = job.play("stopped")

    assert not result["changed"] and result["session"]["state"] == "gone"
    assert other.poll() is None


# -- how it is stopped ------------------------------------------------------------------------------------------------


def test_field_23_the_worker_saves_and_its_agent_sees_it_end_by_itself(job, tmp_path):
    saved = tmp_path / "saved"
    worker = (
        "import pathlib, signal, sys, time\n"
        f"def save(*dummy): time.sleep(0.3); pathlib.Path({str(saved)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', flush=True)\n" + SLEEP
    )
    agent = "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    job.start(agent, worker)
    until(lambda: job.lines() == ["ready"])

    result = job.play("stopped", stop_timeout=20)

    assert result["changed"] and saved.exists()
    assert (result["session"]["state"], result["session"]["exit_code"]) == ("finished", 0)
    assert result["session"]["stopped"]
    assert not job.play("stopped")["changed"]


def test_of_torchrun_the_workers_are_asked_and_not_their_helpers(job):
    helper = "import signal\nsignal.signal(signal.SIGTERM, lambda *dummy: print('helper asked', flush=True))\n" + SLEEP
    worker = (
        "import signal, subprocess, sys\n"
        "helper = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "def save(*dummy): print('worker saved', flush=True); helper.kill(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', flush=True)\n" + SLEEP
    )
    agent = (
        "import os, subprocess, sys\nos.environ['TORCHELASTIC_RUN_ID'] = 'none'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"
    )
    job.start(agent, worker, helper)
    until(lambda: job.lines() == ["ready"])

    assert job.play("stopped", stop_timeout=20)["session"]["exit_code"] == 0
    assert job.lines() == ["ready", "worker saved"]


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


def test_stop_ends_the_whole_tree(job, monkeypatch):
    monkeypatch.setattr(reaper, "TERM_SECONDS", 0.5)
    job.start(TREE)
    pids = job.pids(5)
    os.kill(pids[-1], signal.SIGSTOP)

    result = job.play("stopped", stop_timeout=1)

    assert result["session"]["state"] == "finished"
    assert not [pid for pid in pids if living(pid)]
    assert not living(result["session"]["pid"])


@pytest.mark.parametrize("remove", [False, True], ids=["record kept", "record lost"])
def test_stop_finds_the_tree_of_a_runner_that_was_killed(job, monkeypatch, remove):
    monkeypatch.setattr(reaper, "TERM_SECONDS", 0.5)
    session = job.start(TREE)["session"]
    pids = job.pids(5)
    os.kill(session["pid"], signal.SIGKILL)
    until(lambda: not living(session["pid"]))
    if remove:
        (job.folder / "session.json").unlink()

    assert job.play("stopped", check=True)["changed"]
    assert all(living(pid) for pid in pids)
    result = job.play("stopped", stop_timeout=1)

    assert result["changed"] and result["session"]["state"] == "gone"
    assert not [pid for pid in pids if living(pid)]
    assert remove or result["session"]["stopped"]
    assert not job.play("stopped")["changed"]


def test_a_running_session_is_known_without_its_record(job):
    session = job.start(SLEEP)["session"]
    (job.folder / "session.json").unlink()

    assert job.play("stopped", check=True)["session"]["state"] == "running"
    assert job.start(SLEEP)["changed"] is False
    job.play("stopped")
    assert not living(session["pid"]) and not living(session["child_pid"])


def test_field_06_what_the_program_leaves_behind_ends_with_it(job):
    """An orphan that held the port used to keep the next run from starting."""
    holder = (
        "import os, signal, socket\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "held = socket.socket(); held.bind(('127.0.0.1', 0)); held.listen()\n"
        "print(os.getpid(), flush=True); print(held.getsockname()[1], flush=True)\n" + SLEEP
    )
    parent = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode(), child.stdout.readline().decode(), sep='', end='')\n"
        "raise SystemExit(5)"
    )
    job.start(parent, holder)

    assert job.ended()["exit_code"] == 5
    pid, port = job.pids(2)
    assert not living(pid)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_stop_finds_an_orphan_that_cleared_its_environment(job):
    """Nothing but its ancestry tells whose it is, and the runner takes orphans in."""
    orphan = SAY + SLEEP
    parent = (
        f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {orphan!r}], env={{}}, start_new_session=True)"
    )
    job.start(f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {parent!r}])\n{SAY}{SLEEP}")
    pids = job.pids(2)
    runner = job.record()["pid"]
    assert {processes.process(pid).ppid for pid in pids} == {runner}
    assert {processes.process(pid).marker for pid in pids} == {None, job.record()["id"]}

    job.play("stopped")

    assert not [pid for pid in pids if living(pid)]


def test_nobody_else_is_ever_touched(jobs, strangers, monkeypatch):
    monkeypatch.setattr(reaper, "TERM_SECONDS", 0.5)
    job, neighbour = jobs(), jobs("job-10")
    session = job.start(IGNORE + SAY + SLEEP)["session"]
    neighbour.start(IGNORE + SAY + SLEEP)
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
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *dummy: (time.sleep(1), print('saved', flush=True), sys.exit(0)))\n"
    "print('ready', flush=True)\n" + SLEEP
).replace("import signal", "import signal, time")


def test_ctrl_c_in_the_pane_lets_the_program_save_and_is_a_users_stop(job):
    job.start(SAVE, stop_timeout=20)
    until(lambda: job.lines() == ["ready"])
    tmux("send-keys", "-t", "=job-1:", "C-c")

    ended = job.ended()
    assert (ended["exit_code"], ended["stopped"], ended["terminated_by"]) == (0, True, None)
    assert job.lines() == ["ready", "saved"]


def test_a_host_that_goes_down_lets_the_program_save_and_is_no_users_stop(job):
    session = job.start(SAVE, stop_timeout=20)["session"]
    until(lambda: job.lines() == ["ready"])
    # As systemd does it; the second one hurries nobody.
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(session["pid"], number)

    ended = job.ended()
    assert (ended["exit_code"], ended["stopped"], ended["terminated_by"]) == (0, False, "SIGTERM")
    assert job.lines() == ["ready", "saved"]
    assert not (job.folder / ".session/stop").exists()


def test_killing_the_tmux_session_by_hand_ends_the_program(job):
    session = job.start(SLEEP)["session"]
    tmux("kill-session", "-t", "=job-1")

    ended = job.ended()
    assert (ended["stopped"], ended["terminated_by"]) == (False, "SIGHUP")
    until(lambda: not living(session["pid"]))
    assert not living(session["child_pid"])


# -- a program that dies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "sys.exit(75)"])
def test_a_program_that_dies_is_started_again_where_that_is_wanted(job, how):
    orphan = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {SAY + SLEEP!r}]); time.sleep(1)"
    program = (
        f"import time\nif os.path.exists('died'): print('again', flush=True); time.sleep(600)\nopen('died', 'w'); {how}"
    )
    job.start(f"{orphan.replace('import', 'import time,', 1)}\n{program}", revive=True)
    until(lambda: "again" in job.lines())

    record = job.record()
    assert (record["revived"], record["ended"], record["stopped"]) == (1, None, False)
    assert record["died_of"] == ("signal 9" if "kill" in how else "code 75")
    assert any(line.startswith(f"session: job-1 died of {record['died_of']}; restarting") for line in job.lines())
    # What the first one left behind is gone.
    first, second = [int(line) for line in job.lines() if line.isdigit()]
    assert not living(first) and living(second)
    assert job.play("stopped")["session"]["ended"] is not None
    assert (job.record()["stopped"], job.record()["revived"]) == (True, 1)


def test_a_program_that_dies_again_and_again_is_started_ever_more_slowly_until_it_is_stopped(job):
    job.start("print('tried', flush=True); raise SystemExit(75)", revive=True)
    until(lambda: job.lines().count("tried") >= 3)
    waits = [line.rsplit("in ", 1)[1] for line in job.lines() if "restarting" in line]
    assert waits[:2] == ["1 s", "2 s"]
    assert job.play("stopped")["session"]["stopped"]
    tried = job.lines().count("tried")
    assert job.ended()["exit_code"] == 75
    assert job.lines().count("tried") == tried


@pytest.mark.parametrize("code", [0, 1])
def test_a_program_that_has_ended_is_not_started_again(job, code):
    job.start(f"raise SystemExit({code})", revive=True)
    assert (job.ended()["exit_code"], job.record()["revived"]) == (code, 0)


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


def test_a_session_of_somebody_else_is_left_alone(job):
    subprocess.run(["tmux", "new-session", "-d", "-s", job.name, "sleep 600"], check=True)

    for check in (True, False):
        result = job.play(argv=["true"], check=check)
        assert result["failed"] and "did not start" in result["msg"]
    assert not job.play("absent")["changed"]
    assert tmux("has-session", "-t", f"={job.name}").returncode == 0


def test_two_folders_do_not_share_a_name_while_one_runs(jobs):
    first, second = jobs(), jobs()
    second.folder = second.folder.with_name("it's; #{another}")
    second.log = second.folder / "log" / f"{second.name}.log"
    first.start(SLEEP)
    refused = second.play(argv=["true"])
    assert refused["failed"] and f"is already running for {first.folder} , not for {second.folder}" in refused["msg"]

    first.play("stopped")
    second.start(SLEEP)
    assert first.play("absent")["session"] == {"state": "absent"}
    assert "another" in first.play(argv=["true"])["msg"]
    assert second.play("stopped", check=True)["session"]["state"] == "running"


def test_names_match_exactly(jobs):
    longer = jobs("job-12")
    longer.start(SLEEP)
    shorter = jobs("job-1")

    assert not shorter.play("absent")["changed"]
    assert shorter.start(SLEEP)["changed"]
    shorter.play("absent")
    assert longer.play("stopped", check=True)["session"]["state"] == "running"


def test_two_controllers_at_once_start_one_session(job):
    """Two processes, since the module prints its result and exits."""
    options = {"name": job.name, "state_dir": str(job.folder), "argv": [sys.executable, "-c", SAY + SLEEP]}
    program = (
        "import json, sys\n"
        "from ansible.module_utils.testing import patch_module_args\n"
        "from ansible_collections.nanochat.ddp.plugins.modules import tmux_session\n"
        "with patch_module_args(json.loads(sys.argv[1])): tmux_session.main()\n"
    )
    results = []

    def play():
        command = [sys.executable, "-c", program, json.dumps(options)]
        results.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    threads = [threading.Thread(target=play) for dummy in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(result["changed"] for result in results) == [False, True]
    assert results[0]["session"]["id"] == results[1]["session"]["id"]
    assert len(job.pids(1)) == 1
