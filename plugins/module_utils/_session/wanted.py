# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings a session into its wanted state, for the module tmux_session and for the agent."""

from __future__ import annotations

import os
import shutil
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .._kit import bare
from .._kit import env_file as env_file_utils
from .._kit import processes as processes_utils
from .._kit.files import Busy
from .._kit.logind import logind
from . import boot
from . import session as session_utils
from . import tmux as tmux_utils
from .record import Status

STARTING = ("started", "restarted", "ready")
# Parameters of tmux_session.
OPTIONS: Dict[str, Dict[str, object]] = {
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
ERRORS = (Busy, session_utils.SessionError, tmux_utils.TmuxError, env_file_utils.EnvFileError, OSError, ValueError)


def decide(session: session_utils.Session, params: Mapping[str, Any], spec: Optional[session_utils.Spec]) -> str:
    """The action that brings the session into the wanted state."""
    status, wanted = session.status()["state"], params["state"]
    running = status == session_utils.RUNNING
    if wanted == "restarted":
        return "restart" if running else "start"
    if spec is not None:
        if running:
            return "none" if session.same(spec) else "restart"
        ended_as_wanted = status == session_utils.FINISHED and not params["rerun"] and session.same(spec)
        return "none" if ended_as_wanted else "start"
    if wanted == "absent" and (status != session_utils.ABSENT or session.launch()):
        return "remove"
    return "stop" if running or session.left_over() else "none"


def carry_out(session: session_utils.Session, action: str, spec: Optional[session_utils.Spec], timeout: int) -> None:
    """Do it. Before a start, the remains of an earlier session are ended."""
    if spec is not None:
        # Do not stop what could not be restarted.
        session.check_startable(spec)
    session.stop(timeout)
    if action == "remove":
        session.remove()
    elif spec is not None:
        session.start(spec, timeout)


def difference(session: session_utils.Session, action: str, spec: Optional[session_utils.Spec]) -> Dict[str, str]:
    """The session before and after, for the diff."""
    status = session.status()["state"]
    before = session.describe(None, status)
    after = before
    if action == "stop":
        after = session.describe(None, session_utils.FINISHED if status == session_utils.RUNNING else status)
    elif action != "none":
        after = session.describe(spec, session_utils.ABSENT if action == "remove" else session_utils.RUNNING)
    return {"before": before, "after": after, "before_header": session.name, "after_header": session.name}


def connect(state: str) -> Tuple[tmux_utils.Tmux, bool]:
    """The user's tmux server, and whether logging out would kill what starts now."""
    if state in STARTING and bare.find("tmux") is None:
        raise tmux_utils.TmuxError("tmux is not installed on this host; install the package tmux")
    # Inside tmux the client would use the surrounding server instead of the user's.
    os.environ.pop("TMUX", None)
    if state not in ("started", "restarted"):
        return tmux_utils.Tmux(), False
    kills, lingers = logind(processes_utils.user_name(os.getuid()))
    scope = shutil.which("systemd-run") if kills and lingers and os.environ.get("XDG_RUNTIME_DIR") else None
    # Outside our login, which logging out would kill.
    return tmux_utils.Tmux([scope, "--user", "--scope", "--quiet", "--"] if scope else ()), kills


def warnings_of_logout(status: Status) -> List[str]:
    """Warns if the session will not survive the current SSH connection."""
    if status["state"] != session_utils.RUNNING or not tmux_utils.ends_with_login(status.get("pid", 0)):
        return []
    user = processes_utils.user_name(os.getuid())
    return [
        f"systemd kills the processes of {user} at logout here (KillUserProcesses=yes), so this session will end with "
        f"the SSH connection; enable lingering (loginctl enable-linger {user}), log out everywhere and start it again"
    ]


def tmux_session(check: bool = False, **given: Any) -> Dict[str, Any]:
    """Bring the session into its state, or predict that, and return the result of the module with these options."""
    params: Dict[str, Any] = {**{name: option.get("default") for name, option in OPTIONS.items()}, **given}
    tmux, logout_kills = connect(params["state"])
    session = session_utils.Session(params["name"], params["state_dir"], tmux)
    spec = None
    if params["state"] in STARTING:
        spec = session_utils.spec_from(session.name, session.state_dir, params)
        session.check_free()
    if spec is not None and params["state"] == "ready":
        session.check_startable(spec)
        return {"changed": False, "action": "none", "session": session.status(), "warnings": []}
    with session.locked(make=spec is not None and not check, timeout=params["stop_timeout"] + 60):
        action = decide(session, params, spec)
        diff = difference(session, action, spec)
        if action != "none" and not check:
            carry_out(session, action, spec, params["stop_timeout"])
        entry = boot.BootEntry(session.name, session.state_dir)
        wanted = False if params["state"] == "absent" else params["at_boot"] if spec else None
        before, after, missing = entry.bring(wanted, check)
        status = session.status()
    warnings = [*([missing] if missing else []), *(warnings_of_logout(status) if logout_kills else [])]
    if before != after:
        diff = {**diff, "before": f"{diff['before']}at boot: {before}\n", "after": f"{diff['after']}at boot: {after}\n"}
    changed = action != "none" or before != after
    return {
        "changed": changed,
        "action": action,
        "diff": diff,
        "session": status,
        "at_boot": after,
        "warnings": warnings,
    }
