# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One named session: its arguments, its outcome, and how it is brought into its state, for the module tmux_session and for the agent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import time
import uuid
from typing import Any, Mapping

from .._contract.run_folder import SESSION, SESSION_FILES
from .._kit import bare, host_code, processes
from .._kit import env_file as env_file_utils
from .._kit.files import Busy, locked, write_json_when_full, write_unless_same
from .._kit.logind import logind
from . import boot, reaper
from . import runner as session_runner
from . import tmux as tmux_utils
from .record import LAUNCH, RUNNER, SCRIPT, Launch, Record, Spec, StartArguments, exposed_start, launch_in, record_in

STARTING = ("started", "restarted", "ready")
# Parameters of tmux_session.
OPTIONS: dict[str, dict[str, object]] = {
    "name": {"type": "str", "required": True},
    "state_dir": {"type": "path", "required": True},
    "argv": {"type": "list", "elements": "str"},
    "chdir": {"type": "path"},
    "env_file": {"type": "path"},
    "log": {"type": "path"},
    "state": {
        "type": "str",
        "choices": ["started", "restarted", "ready", "stopped", "absent"],
        "default": "started",
    },
    "rerun": {"type": "bool", "default": False},
    "revive": {"type": "bool", "default": False},
    "at_boot": {"type": "bool"},
    "stop_timeout": {"type": "int", "default": 60},
}
NEEDED = [("state", state, ["argv"]) for state in STARTING]

ABSENT = "absent"
RUNNING = "running"
FINISHED = "finished"
GONE = "gone"

# Time for a runner to report that it is alive, and to exit once its job is dead.
_START_SECONDS = 20.0
_GO_SECONDS = 10.0


class SessionError(Exception):
    """Which session, what was tried, what was seen and what to do, in one sentence."""


ERRORS = (Busy, SessionError, tmux_utils.TmuxError, env_file_utils.EnvFileError, OSError, ValueError)


class Session:
    """The session `name` with its files in `state_dir`."""

    def __init__(self, name: str, state_dir: str, tmux: tmux_utils.Tmux) -> None:
        self.name = tmux_utils.check_name(name)
        self.state_dir = os.path.abspath(state_dir)
        self.folder = os.path.join(self.state_dir, SESSION_FILES)
        self.record = os.path.join(self.state_dir, SESSION)
        self.tmux = tmux

    # -- state --------------------------------------------------------------------------------------------------------

    def status(self) -> Record:
        """The content of session.json, and `state`."""
        identity = self.identity()
        state = RUNNING if identity is not None and reaper.runner_alive(identity) else GONE
        # It may have ended meanwhile.
        record = record_in(self.state_dir)
        if record.get("ended") is not None:
            state = FINISHED
        elif not record and not self._is_ours(self.name):
            state = ABSENT
        return {**record, "state": state}

    def same(self, spec: Spec) -> bool:
        """Whether the last start had the same arguments."""
        launch = launch_in(self.state_dir)
        return bool(launch) and launch.get("session") == self.name and launch.get("given") == _given(spec, launch["id"])

    def describe(self, spec: Spec | None, state: str) -> str:
        """Arguments of a start as text for a diff; only names of environment variables."""
        launch = launch_in(self.state_dir)
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

    def _is_ours(self, name: str) -> bool:
        """Whether a session with this name is in tmux, and none of others."""
        return self.tmux.other(name, self.folder) == ""

    def identity(self) -> reaper.SessionIdentity | None:
        """Identity of this session's processes; None if they are from another boot or machine."""
        record = record_in(self.state_dir)
        # If somebody moved session.json away, launch.json knows the last start.
        last = record if record.get("id") else launch_in(self.state_dir)
        if last.get("boot_id") != processes.boot_id():
            return None
        pid, start = record.get("pid"), record.get("pid_start")
        return reaper.SessionIdentity(last["id"], os.getuid(), (pid, start) if pid and start else None)

    # -- actions ------------------------------------------------------------------------------------------------------

    def start(self, spec: Spec, revive: bool, stop_timeout: float) -> None:
        """Write the files and start; the session must be startable and not running."""
        # Remove our last session from tmux, under any name, and ended ones with this name.
        for name in {launch_in(self.state_dir).get("session", ""), self.name} - {""}:
            if self._is_ours(name):
                self.tmux.kill(name)
        identifier = uuid.uuid4().hex
        try:
            self._prepare(spec, identifier, revive, stop_timeout)
        except OSError as error:
            raise SessionError(f"session {self.name}: cannot write {error.filename}: {error.strerror}") from error
        self.tmux.start(self.name, self.state_dir)
        self._wait_until_started(identifier)

    def stop(self, timeout: float) -> None:
        """End the session's processes and verify that they are dead."""
        identity = self.identity()
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
        record = record_in(self.state_dir)
        if record and record.get("ended") is None:
            # Its runner was already gone or could not write, so nobody else can record the stop.
            with contextlib.suppress(OSError):
                write_json_when_full(self.record, {**record, "stopped": True})

    def remove(self) -> None:
        """Remove the session from tmux and its records; its log and run.sh stay."""
        with contextlib.suppress(tmux_utils.TmuxError):  # a server of another version of tmux keeps its dead pane
            if self._is_ours(self.name):
                self.tmux.kill(self.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.path.lexists(self.record):
            os.unlink(self.record)

    def check_free(self) -> None:
        """The name must be free in tmux, of other people's sessions and of runs in another folder."""
        other = self.tmux.other(self.name, self.folder)
        if other:
            raise SessionError(
                f"tmux already has a session {self.name}, which is not of {self.state_dir} and runs {other}: "
                f"end it (tmux kill-session -t '={self.name}') or choose another name"
            )

    def check_startable(self, spec: Spec) -> None:
        """Requirements of a start, checked before anything running is stopped for it."""
        program = spec["argv"][0]
        if spec["env_file"] and not os.path.isfile(spec["env_file"]):
            raise SessionError(
                f"session {self.name}: its environment file {spec['env_file']} does not exist; write it first"
            )
        if not os.path.isdir(spec["chdir"]):
            raise SessionError(f"session {self.name}: its folder {spec['chdir']} does not exist; create it first")
        if "/" in program and not os.access(os.path.join(spec["chdir"], program), os.X_OK):
            raise SessionError(f"session {self.name}: {program} does not exist or cannot be executed")
        exposed = exposed_start(self.state_dir, spec)
        if exposed:
            raise SessionError(f"session {self.name} is not started: {exposed}")

    def _prepare(self, spec: Spec, identifier: str, revive: bool, stop_timeout: float) -> None:
        """Write the runner's files; remove leftovers of an earlier session."""
        os.makedirs(self.folder, exist_ok=True)
        os.makedirs(os.path.dirname(spec["log"]), exist_ok=True)
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
            "revive": revive,
            "given": _given(spec, identifier),
        }
        write_json_when_full(os.path.join(self.folder, LAUNCH), launch, 0o600)

    def _wait_until_started(self, identifier: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        # It records its job, or that it refused to start it.
        while (record := record_in(self.state_dir)).get("id") != identifier or (
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
        f"cd {shlex.quote(spec['chdir'])} || exit 1",
    ]
    if spec["env_file"]:
        lines += ["set -a", f". {shlex.quote(spec['env_file'])} || exit 1", "set +a"]
    lines.append("exec " + " \\\n  ".join(map(shlex.quote, spec["argv"])))
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
    return {
        "argv": list(argv),
        "chdir": os.path.abspath(options["chdir"] or state_dir),
        "env_file": os.path.abspath(env_file) if env_file else None,
        "log": os.path.abspath(options["log"] or os.path.join(state_dir, "log", f"{name}.log")),
    }


def _given(spec: Spec, salt: str) -> StartArguments:
    """Arguments of a start, with salted digests instead of environment values."""
    data = (env_file_utils.read(spec["env_file"]) if spec["env_file"] else b"") or b""
    env = env_file_utils.parse(data)
    values = {"(the whole file)": data} if env is None else {name: os.fsencode(text) for name, text in env.items()}
    digests = {
        name: hashlib.sha256(f"{salt} {name} ".encode() + value).hexdigest()[:8] for name, value in values.items()
    }
    return {**spec, "env": digests}


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


def decide(session: Session, wanted: str, rerun: bool, spec: Spec | None) -> str:
    """The action that brings the session into the wanted state."""
    status = session.status()["state"]
    running = status == RUNNING
    if wanted == "restarted":
        return "restart" if running else "start"
    if spec is not None:
        if running:
            return "none" if session.same(spec) else "restart"
        ended_as_wanted = status == FINISHED and not rerun and session.same(spec)
        return "none" if ended_as_wanted else "start"
    if wanted == "absent" and (status != ABSENT or launch_in(session.state_dir)):
        return "remove"
    identity = session.identity()
    return "stop" if running or (identity and reaper.members(identity)) else "none"


def difference(session: Session, action: str, spec: Spec | None) -> dict[str, str]:
    """The session before and after, for the diff."""
    status = session.status()["state"]
    ends = {"none": status, "stop": FINISHED if status == RUNNING else status, "remove": ABSENT}
    before = session.describe(None, status)
    after = session.describe(None if action in ends else spec, ends.get(action, RUNNING))
    return {"before": before, "after": after, "before_header": session.name, "after_header": session.name}


def connect(state: str) -> tmux_utils.Tmux:
    """The user's tmux server."""
    if state in STARTING and bare.find("tmux") is None:
        raise tmux_utils.TmuxError("tmux is not installed on this host; install the package tmux")
    # Inside tmux the client would use the surrounding server instead of the user's.
    os.environ.pop("TMUX", None)
    if state not in ("started", "restarted"):
        return tmux_utils.Tmux()
    kills, lingers = logind(processes.user_name(os.getuid()))
    scope = shutil.which("systemd-run") if kills and lingers and os.environ.get("XDG_RUNTIME_DIR") else None
    # Outside our login, which logging out would kill.
    return tmux_utils.Tmux([scope, "--user", "--scope", "--quiet", "--"] if scope else ())


def tmux_session(check: bool = False, **given: Any) -> dict[str, Any]:
    """Bring the session into its state, or predict that, and return the result of the module with these options."""
    params: dict[str, Any] = {**{name: option.get("default") for name, option in OPTIONS.items()}, **given}
    session = Session(params["name"], params["state_dir"], connect(params["state"]))
    spec = None
    if params["state"] in STARTING:
        spec = spec_from(session.name, session.state_dir, params)
        session.check_free()
    if spec is not None and params["state"] == "ready":
        session.check_startable(spec)
        return {"changed": False, "action": "none", "session": session.status(), "warnings": []}
    if spec is not None and not check:
        os.makedirs(session.state_dir, exist_ok=True)
    is_there = os.path.isdir(session.state_dir)
    # A second controller that works on the same session waits.
    with locked(session.state_dir, params["stop_timeout"] + 60) if is_there else contextlib.nullcontext():
        action = decide(session, params["state"], params["rerun"], spec)
        diff = difference(session, action, spec)
        if action != "none" and not check:
            if spec is not None:
                # Do not stop what could not be restarted.
                session.check_startable(spec)
            # Before a start, the remains of an earlier session are ended.
            session.stop(params["stop_timeout"])
            if action == "remove":
                session.remove()
            elif spec is not None:
                session.start(spec, params["revive"], params["stop_timeout"])
        before = after = boot.NONE
        missing, wanted = "", False if params["state"] == "absent" else params["at_boot"] if spec else None
        if wanted is not None:
            before, after, missing = boot.at_boot(session.name, session.state_dir, wanted, check)
        status = session.status()
    if before != after:
        diff = {**diff, "before": f"{diff['before']}at boot: {before}\n", "after": f"{diff['after']}at boot: {after}\n"}
    changed = action != "none" or before != after
    return {
        "changed": changed,
        "action": action,
        "diff": diff,
        "session": status,
        "at_boot": after,
        "warnings": [missing] if missing else [],
    }
