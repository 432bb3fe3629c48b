# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs in a session's tmux pane: starts the run script, logs its output and records how it ended.

Python 3.9 with the standard library, packed into one program with everything it imports. Its only argument is a folder:
it reads launch.json there and writes session.json (its keys are in record.py).
Everything that the job starts stays below this process, or is reparented to it, so nothing
outlives the job. SIGTERM, SIGHUP (shutdown, or tmux was killed) and Ctrl-C in the pane stop the job gently; a second
Ctrl-C at once. Only Ctrl-C counts as a stop by the user. A job to be revived is restarted when it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .._contract.politeness import OFF, VARIABLE
from .._contract.run_folder import SESSION
from .._kit import env_file, processes
from .._kit.files import write_json_when_full
from . import boot, reaper
from .record import LAUNCH, SCRIPT, Launch, Record, cut_short, exposed_start
from .tmux import TmuxError

_PR_SET_CHILD_SUBREAPER = 36
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 65536
REFUSED = 1  # the exit code of a job that is not started
FIRST_TO_BE_KILLED = "1000"
LOWEST = 19
# First delay before restarting a dead job; doubles each time it dies again soon.
_REVIVE_SECONDS, _LONGEST_SECONDS = 1.0, 60.0


def yield_to_others(proc: str = "/proc/self") -> None:
    """Give this process and its children CPU and disk only when no other program wants them, and let them be killed first when
    memory runs out. Needs no root; whatever the kernel or container refuses is skipped."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    # This also makes disk I/O idle class.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path(proc, "oom_score_adj").write_text(FIRST_TO_BE_KILLED, encoding="ascii")
    # With sched_autogroup the kernel schedules sessions first, and priorities count only within one.
    for dummy in range(5):
        try:
            Path(proc, "autogroup").write_text(str(LOWEST), encoding="ascii")
            return
        except BlockingIOError:
            # The kernel accepts one such change per 0.1 s, system-wide.
            time.sleep(0.11)
        except OSError:
            return


def base_environment(session_id: str, restarted: bool = False) -> dict[str, str]:
    """The job's environment before its env file: without variables of the terminal or an earlier tmux server."""
    user = pwd.getpwuid(os.getuid())
    return {
        "HOME": user.pw_dir,
        "LANG": "C.UTF-8",
        "LOGNAME": user.pw_name,
        "PATH": _PATH,
        # Otherwise Python would buffer its output, because it writes to a pipe.
        "PYTHONUNBUFFERED": "1",
        "SHELL": user.pw_shell or "/bin/sh",
        "USER": user.pw_name,
        processes.SESSION_VARIABLE: session_id,
        **({processes.RESTARTED_VARIABLE: "1"} if restarted else {}),
    }


class Output(threading.Thread):
    """The job's output, which goes to the log at once, and to the pane as long as that accepts it."""

    def __init__(self, log: str) -> None:
        super().__init__(daemon=True)
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # The write end is kept for the next start of the job, so that the pipe has no end before.
        self.source, self.sink = os.pipe()
        # A pane stopped with Ctrl-S must not stop the job.
        os.set_blocking(1, False)

    def run(self) -> None:
        while data := os.read(self.source, _CHUNK):
            self._write(1, data)
            self._write(self.log, data)

    def say(self, text: str) -> None:
        """A message of the runner, only for the pane."""
        self._write(1, f"[{text}]\n".encode("utf-8", "backslashreplace"))

    def log_line(self, text: str) -> None:
        """A message of the runner that should outlive the pane."""
        self.say(text)
        self._write(self.log, f"session: {text}\n".encode("utf-8", "backslashreplace"))

    @staticmethod
    def _write(descriptor: int, data: bytes) -> None:
        """Write as much as possible: neither a full disk nor a closed pane may end the job."""
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]


class Runner:
    """One session from start to end."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, LAUNCH), encoding="utf-8") as file:
            self.launch: Launch = json.load(file)
        self.given, self.run_dir = self.launch["given"], os.path.dirname(folder)
        self.record = os.path.join(self.run_dir, SESSION)
        env = env_file.read(self.given["env_file"]) if self.given["env_file"] else None
        # It may ask for the lowest priority (ddp_polite low and guest).
        self.polite = (env_file.parse(env or b"") or {}).get(VARIABLE, OFF) != OFF
        self.stops = self.interrupts = 0  # signals; those of Ctrl-C among them
        self.code: int | None = None  # of the ended job; if negative, of the signal
        self.child: subprocess.Popen[bytes] | None = None
        pid, start = os.getpid(), processes.start_ticks(os.getpid())
        self.me = reaper.SessionIdentity(self.launch["id"], os.getuid(), (pid, start))
        self.stop_asked = os.path.join(folder, "stop")
        self.state: Record = {
            "id": self.launch["id"],
            "session": self.launch["session"],
            "boot_id": processes.boot_id(),
            "pid": pid,
            "pid_start": start,
            "child_pid": None,
            "log": self.given["log"],
            # Where this session begins in a log shared with earlier ones.
            "started": time.time(),
            "ended": None,
            "exit_code": None,
            "signal": None,
            "stopped": False,
            "terminated_by": None,
            "revived": 0,
            "died_of": None,
        }

    def run(self) -> None:
        """Start the job, pass on its output until it ends, end its leftovers and record the outcome."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked_to_stop)
        # Before anything runs: a session that cannot be recorded would be unknown to everybody.
        write_json_when_full(self.record, self.state)
        output = Output(self.given["log"])
        output.start()
        pause = _REVIVE_SECONDS
        while True:
            begun = time.monotonic()
            self._start(output)
            code = self._follow(output)
            # Of a job that is to be revived.
            died = bool(self.launch.get("revive")) and cut_short(None if code < 0 else code) and not self._over()
            # A killed keeper leaves a rank behind, which should save.
            grace = self.launch["stop_timeout"] if died else 0
            reaper.end(self.me, grace, lambda: self.interrupts > 0)
            self._reap()
            if not died:
                break
            if time.monotonic() - begun > _LONGEST_SECONDS:
                pause = _REVIVE_SECONDS
            self._revive_later(code, pause, output)
            if self._over():
                break
            pause = min(2 * pause, _LONGEST_SECONDS)
        # Wait for the rest of it, but not for a process that nobody can kill.
        os.close(output.sink)
        output.join(2.0)
        self._ended(code, output)

    def _start(self, output: Output) -> None:
        self.code = None
        exposed = exposed_start(self.run_dir, self.given)
        if exposed:
            output.log_line(f"{self.launch['session']} is not started: {exposed}")
            self.code = REFUSED
            return
        self.child = subprocess.Popen(  # pylint: disable=ansible-bad-function
            ["/bin/sh", os.path.join(self.run_dir, SCRIPT)],
            env=base_environment(self.launch["id"], restarted=self.state["revived"] > 0),
            stdin=subprocess.DEVNULL,
            stdout=output.sink,
            stderr=output.sink,
            start_new_session=True,
            # Of a session that is new, in which the job begins.
            preexec_fn=yield_to_others if self.polite else None,
        )
        self.state["child_pid"] = self.child.pid
        self._save(output)

    def _follow(self, output: Output) -> int:
        """The job's exit code, after it ended or was stopped."""
        while self.code is None:
            time.sleep(0.1)
            if time.time() < self.state["started"]:
                # The clock was set back, as at a boot: all that is written from now on would seem to be of an earlier session.
                self.state["started"] = time.time()
                self._save(output)
            if self.stops:
                self._stop_gently(output)
            self._reap()
        return self.code

    def _over(self) -> bool:
        """Whether a user or the host has ended the session."""
        return bool(self.stops) or os.path.exists(self.stop_asked)

    def _revive_later(self, code: int, pause: float, output: Output) -> None:
        """Report it and wait, also for an unkillable process of the job, beside which no other may start."""
        self.state.update({"child_pid": None, "died_of": _how(code)})
        self.state["revived"] += 1
        self._save(output)
        output.log_line(f"{self.launch['session']} died of {_how(code)}; restarting in {pause:.0f} s")
        until = time.monotonic() + pause
        while not self._over() and (time.monotonic() < until or reaper.members(self.me)):
            time.sleep(0.5)
            self._reap()

    def _stop_gently(self, output: Output) -> None:
        output.say("stopping; Ctrl-C ends it at once")
        if self.interrupts:
            # Tell any program that would restart the session of a request made in the pane.
            with contextlib.suppress(OSError), open(self.stop_asked, "a", encoding="utf-8"):
                pass
        if self.launch.get("revive") and self.code is None and self.state["child_pid"]:
            # It informs the other hosts, and ends its own rank.
            os.kill(self.state["child_pid"], signal.SIGINT if self.interrupts else signal.SIGTERM)
        asked = self.interrupts
        reaper.end(self.me, self.launch["stop_timeout"], hurry=lambda: self.interrupts > asked)

    def _reap(self) -> None:
        """Reap ended processes: orphans, and the job itself."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.state["child_pid"]:
                    self.code = os.waitstatus_to_exitcode(status)

    def _asked_to_stop(self, number: int, frame: Any) -> None:
        self.stops += 1
        if number == signal.SIGINT:
            self.interrupts += 1
        elif number == signal.SIGTERM or not self.state["terminated_by"]:
            # At a shutdown SIGHUP comes as well.
            self.state["terminated_by"] = signal.Signals(number).name

    def _ended(self, code: int, output: Output) -> None:
        stopped = bool(self.interrupts) or os.path.exists(self.stop_asked)
        exit_code, number = (None, -code) if code < 0 else (code, None)
        self.state.update({"ended": time.time(), "exit_code": exit_code, "signal": number, "stopped": stopped})
        self._save(output)
        by = self.state["terminated_by"]
        how = "was stopped" if stopped else f"was ended by {by}" if by else "ended"
        output.say(f"{self.launch['session']} {how} with {_how(code)}; log: {self.given['log']}")

    def _save(self, output: Output) -> None:
        """Record the state; a full disk does not end the job."""
        try:
            write_json_when_full(self.record, self.state)
        except OSError as error:
            output.say(f"cannot write {self.record}: {error.strerror}")


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def main() -> None:
    """The program: its argument is the folder with launch.json; `boot` after it starts the session again that a reboot has ended."""
    folder, *more = sys.argv[1:]
    try:
        if more == [boot.BOOT]:
            boot.restart(os.path.dirname(folder))
        else:
            Runner(folder).run()
    except TmuxError as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror or error}") from error
