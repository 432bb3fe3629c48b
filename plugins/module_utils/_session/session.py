# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One named session: its arguments, its outcome, and the steps to bring it into a state."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import time
import uuid
from typing import Any, Mapping, NamedTuple

from .._contract.run_folder import SESSION, SESSION_FILES
from .._kit import env_file as env_file_utils
from .._kit import host_code, processes
from .._kit.files import locked, write_json_when_full, write_unless_same
from . import reaper
from . import runner as session_runner
from . import tmux as tmux_utils
from .record import (
    LAUNCH,
    RUNNER,
    SCRIPT,
    Launch,
    Record,
    StartArguments,
    Status,
    exposed_start,
    label_of,
    launch_in,
    record_in,
)

ABSENT = "absent"
RUNNING = "running"
FINISHED = "finished"
GONE = "gone"

# Time for a runner to report that it is alive, and to exit once its job is dead.
_START_SECONDS = 20.0
_GO_SECONDS = 10.0


class SessionError(Exception):
    """Which session, what was tried, what was seen and what to do, in one sentence."""


class Spec(NamedTuple):
    """The job of a session."""

    argv: tuple[str, ...]
    chdir: str
    env_file: str | None
    log: str
    revive: bool = False


class Session:
    """The session `name` with its files in `state_dir`."""

    def __init__(self, name: str, state_dir: str, tmux: tmux_utils.Tmux) -> None:
        self.name = tmux_utils.check_name(name)
        self.state_dir = os.path.abspath(state_dir)
        self.folder = os.path.join(self.state_dir, SESSION_FILES)
        self.record = os.path.join(self.state_dir, SESSION)
        self.tmux = tmux
        self.label = label_of(self.state_dir)

    # -- state --------------------------------------------------------------------------------------------------------

    def launch(self) -> Launch:
        """Arguments of the last launch; empty if there was none."""
        return launch_in(os.path.join(self.folder, LAUNCH))

    def recorded(self) -> Record:
        """The content of session.json."""
        return record_in(self.record)

    def status(self) -> Status:
        """The content of session.json, and `state`."""
        record = self.recorded()
        if record.get("ended") is not None:
            return {**record, "state": FINISHED}
        identity = self._identity(record)
        if identity is not None and reaper.runner_alive(identity):
            return {**record, "state": RUNNING}
        if not record:
            return {"state": GONE if self._in_tmux(self.name) else ABSENT}
        # It may have ended between the two reads.
        record = self.recorded() or record
        return {**record, "state": FINISHED if record.get("ended") is not None else GONE}

    def left_over(self) -> dict[int, processes.Process]:
        """All processes of the session except its runner."""
        identity = self._identity(self.recorded())
        return reaper.members(identity) if identity else {}

    def same(self, spec: Spec) -> bool:
        """Whether the last start had the same arguments."""
        launch = self.launch()
        return bool(launch) and launch.get("session") == self.name and launch.get("given") == _given(spec, launch["id"])

    def describe(self, spec: Spec | None, state: str) -> str:
        """Arguments of a start as text for a diff; only names of environment variables."""
        launch = self.launch()
        last = launch.get("given")
        given = last if spec is None else _given(spec, str(launch.get("id")))
        lines = [f"state: {state}"]
        if state != ABSENT and given:
            lines += [f"chdir: {given['chdir']}", f"log: {given['log']}"]
            lines += ["argv:", *(f"  {shlex.quote(word)}" for word in given["argv"]), "env:"]
            before = last["env"] if last else {}
            for name, digest in sorted(given["env"].items()):
                lines.append(f"  {name}" + (" (changed)" if before.get(name, digest) != digest else ""))
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode() + "\n"

    def _in_tmux(self, name: str) -> tmux_utils.TmuxSession | None:
        """This folder's session with this name in tmux, None if there is none or it is somebody else's."""
        found = self.tmux.look(name)
        return found if found and found.label == self.label else None

    def _identity(self, record: Record) -> reaper.SessionIdentity | None:
        """Identity of this session's processes; None if they are from another boot or machine."""
        # If somebody moved session.json away, launch.json knows the last start.
        last = record if record.get("id") else self.launch()
        if last.get("boot_id") != processes.boot_id():
            return None
        pid, start = record.get("pid"), record.get("pid_start")
        return reaper.SessionIdentity(last["id"], os.getuid(), (pid, start) if pid and start else None)

    # -- actions ------------------------------------------------------------------------------------------------------

    def start(self, spec: Spec, stop_timeout: float) -> None:
        """Write the files and start; the session must be startable and not running."""
        self._clear_tmux()
        identifier = uuid.uuid4().hex
        try:
            self._prepare(spec, identifier, stop_timeout)
        except OSError as error:
            raise SessionError(f"session {self.name}: cannot write {error.filename}: {error.strerror}") from error
        self.tmux.start(self.name, self.state_dir)
        self._wait_until_started(identifier)

    def stop(self, timeout: float) -> None:
        """End the session's processes and verify that they are dead."""
        record = self.recorded()
        identity = self._identity(record)
        if identity is None or not (reaper.runner_alive(identity) or reaper.members(identity)):
            return
        if identity.runner is not None and identity.runner[0] in reaper.own_line(processes.processes()):
            raise SessionError(
                f"session {self.name}: this command runs inside the session that it should stop; run it from outside"
            )
        try:
            # An empty file needs no room.
            os.close(os.open(os.path.join(self.folder, "stop"), os.O_WRONLY | os.O_CREAT, 0o644))
        except OSError:
            # A full disk takes no more files: as Ctrl-C in its pane, which is a user's stop, too.
            runner = processes.process(identity.runner[0]) if identity.runner else None
            if runner is not None and (runner.pid, runner.start) == identity.runner:
                reaper.send(runner, signal.SIGINT)
        left = reaper.end(identity, timeout)
        if not left and identity.runner is not None:
            left = _end_runner(*identity.runner)
        if left:
            named = ", ".join(f"{one.pid} ({one.command[:80]})" for one in left.values())
            raise SessionError(
                f"session {self.name}: these processes are still alive after SIGKILL: {named}; they hang in the kernel "
                "or belong to another user, so kill them by hand or reboot the machine"
            )
        record = self.recorded()
        if record and record.get("ended") is None:
            # Its runner was already gone or could not write, so nobody else can record the stop.
            with contextlib.suppress(OSError):
                write_json_when_full(self.record, {**record, "stopped": True})

    def remove(self) -> None:
        """Remove the session from tmux and its records; its log and run.sh stay."""
        with contextlib.suppress(tmux_utils.TmuxError):  # a server of another version of tmux keeps its dead pane
            if self._in_tmux(self.name):
                self.tmux.kill(self.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.path.lexists(self.record):
            os.unlink(self.record)

    def locked(self, make: bool, timeout: float) -> contextlib.AbstractContextManager[None]:
        """Lock out a second controller that works on the same session."""
        if make:
            os.makedirs(self.state_dir, exist_ok=True)
        return locked(self.state_dir, timeout) if os.path.isdir(self.state_dir) else contextlib.nullcontext()

    def check_free(self) -> None:
        """The name must be free in tmux, of other people's sessions and of runs in another folder."""
        found = self.tmux.look(self.name)
        if found is None or found.label == self.label:
            return
        remedy = f"end it (tmux kill-session -t '={self.name}') or choose another name"
        if not found.label:
            raise SessionError(f"tmux already has a session {self.name} that nanochat.ddp did not start: {remedy}")
        if found.runner is not None:
            raise SessionError(
                f"a session {self.name} is already running for {found.folder}, not for {self.state_dir}: {remedy}"
            )

    def _clear_tmux(self) -> None:
        """Remove our last session from tmux, under any name, and ended ones with this name."""
        last = str(self.launch().get("session", ""))
        if last not in ("", self.name) and self._in_tmux(last):
            self.tmux.kill(last)
        if self.tmux.look(self.name):
            self.tmux.kill(self.name)

    def check_startable(self, spec: Spec) -> None:
        """Requirements of a start, checked before anything running is stopped for it."""
        self.check_free()
        program = spec.argv[0]
        if spec.env_file and not os.path.isfile(spec.env_file):
            raise SessionError(
                f"session {self.name}: its environment file {spec.env_file} does not exist; write it first"
            )
        if not os.path.isdir(spec.chdir):
            raise SessionError(f"session {self.name}: its folder {spec.chdir} does not exist; create it first")
        if "/" in program and not os.access(os.path.join(spec.chdir, program), os.X_OK):
            raise SessionError(f"session {self.name}: {program} does not exist or cannot be executed")
        exposed = exposed_start(self.state_dir, spec.argv, spec.chdir, spec.env_file)
        if exposed:
            raise SessionError(f"session {self.name} is not started: {exposed}")

    def _prepare(self, spec: Spec, identifier: str, stop_timeout: float) -> None:
        """Write the runner's files; remove leftovers of an earlier session."""
        os.makedirs(self.folder, exist_ok=True)
        os.makedirs(os.path.dirname(spec.log), exist_ok=True)
        for stale in (self.record, os.path.join(self.folder, "stop")):
            if os.path.lexists(stale):
                os.unlink(stale)
        program = host_code.program(session_runner.__name__, "main").encode("utf-8")
        write_unless_same(os.path.join(self.folder, RUNNER), program, 0o644)
        write_unless_same(os.path.join(self.state_dir, SCRIPT), script(self.name, spec), 0o755)
        launch: Launch = {
            "id": identifier,
            "boot_id": processes.boot_id(),
            "session": self.name,
            "stop_timeout": stop_timeout,
            "revive": spec.revive,
            "given": _given(spec, identifier),
        }
        write_json_when_full(os.path.join(self.folder, LAUNCH), launch, 0o600)

    def _wait_until_started(self, identifier: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        # It records its job, or that it refused to start it.
        while (record := self.recorded()).get("id") != identifier or (
            record.get("child_pid") or record.get("ended")
        ) is None:
            if time.monotonic() > deadline:
                if record.get("id") == identifier:
                    return  # a full disk does not take the rest
                raise SessionError(
                    f"session {self.name} did not start within {_START_SECONDS:.0f} seconds; its pane shows: "
                    + (self.tmux.screen(self.name) or "nothing; the tmux session is gone")
                )
            time.sleep(0.05)


def script(name: str, spec: Spec) -> bytes:
    """run.sh: the session's command, which a person can also run by hand."""
    lines = [
        "#!/bin/sh",
        f"# What the tmux session {name} runs; by hand: sh run.sh",
        f"cd {shlex.quote(spec.chdir)} || exit 1",
    ]
    if spec.env_file:
        lines += ["set -a", f". {shlex.quote(spec.env_file)} || exit 1", "set +a"]
    lines.append("exec " + " \\\n  ".join(map(shlex.quote, spec.argv)))
    return os.fsencode("\n".join(lines) + "\n")


def spec_from(name: str, state_dir: str, options: Mapping[str, Any]) -> Spec:
    """A session's job, from the options of tmux_session; state_dir is absolute."""
    argv, env_file = options["argv"], options["env_file"]
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SessionError(
            f"session {name}: argv must begin with a program, not with {repr(argv[0]) if argv else 'nothing'}"
        )
    if any("\0" in word for word in argv):
        raise SessionError(f"session {name}: an argument of argv contains a NUL byte")
    return Spec(
        tuple(argv),
        os.path.abspath(options["chdir"] or state_dir),
        os.path.abspath(env_file) if env_file else None,
        os.path.abspath(options["log"] or os.path.join(state_dir, "log", f"{name}.log")),
        options["revive"],
    )


def _given(spec: Spec, salt: str) -> StartArguments:
    """Arguments of a start, with salted digests instead of environment values."""
    data = (env_file_utils.read(spec.env_file) if spec.env_file else b"") or b""
    env = env_file_utils.parse(data)
    values = {"(the whole file)": data} if env is None else {name: os.fsencode(text) for name, text in env.items()}
    digests = {
        name: hashlib.sha256(f"{salt} {name} ".encode() + value).hexdigest()[:8] for name, value in values.items()
    }
    return {"argv": list(spec.argv), "chdir": spec.chdir, "env_file": spec.env_file, "log": spec.log, "env": digests}


def _end_runner(pid: int, start: int) -> dict[int, processes.Process]:
    """The runner exits once its job is dead; a hanging one is killed. Returned if it is still alive."""
    deadline = time.monotonic() + _GO_SECONDS
    while processes.alive(pid, start):
        runner = processes.process(pid)
        if runner is not None and runner.start == start:
            if time.monotonic() > deadline + _GO_SECONDS:
                return {pid: runner}
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGCONT
            reaper.send(runner, number)
        time.sleep(0.05)
    return {}
