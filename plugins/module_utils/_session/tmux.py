# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tmux commands that a session needs; names match exactly."""

from __future__ import annotations

import os
import re
from typing import Optional, Sequence, Tuple

from .._contract.run_folder import SESSION_FILES
from .._kit import bare, processes
from .record import RUNNER, runner_argv

OURS = os.path.join(SESSION_FILES, RUNNER)  # in the command of each session that we have started
DYING_SERVERS = 5  # retries before this is an error
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")


class TmuxError(Exception):
    """tmux's command and its answer."""


def check_name(name: str) -> str:
    """A name that tmux addresses unambiguously: '.' and ':' separate windows and panes."""
    if not _NAME.match(name):
        raise TmuxError(f"{name!r} is not a session name: use letters, digits, '_' and '-', not starting with '-'")
    return name


class Tmux:
    """The user's default tmux server, so that `tmux attach -t NAME` finds the sessions."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.path = bare.find("tmux") or "tmux"
        self._prefix = prefix  # starts a server outside the current login

    def look(self, name: str) -> Optional[Tuple[int, str]]:
        """The process in the session with exactly this name, 0 if it has ended, and its command; None if there is no such session."""
        form = "#{pane_dead} #{pane_pid} #{pane_start_command}"
        code, out, err = self._run("list-panes", "-t", f"={name}:", "-F", form)
        if code and "version" in err:
            raise TmuxError(f"the running tmux server does not understand {self.path}: {err.strip()}")
        if code:
            return None
        dead, pid, command = [*out.partition("\n")[0].split(" ", 2), "", "", ""][:3]
        return int(pid) if dead == "0" and pid.isdigit() else 0, command.strip()

    def other(self, name: str, folder: str) -> Optional[str]:
        """The command of others' session with this name; empty if it is this folder's or an ended one of ours, None if there is none."""
        seen = self.look(name)
        if seen is None:
            return None
        found = processes.process(seen[0]) if seen[0] else None
        # tmux sees a moment later that a process has ended, which has no words any more.
        if found and found.argv:
            return "" if found.argv[-1] == folder else found.command
        return "" if OURS in seen[1] else seen[1]

    def start(self, name: str, state_dir: str) -> None:
        """A session that runs the folder's runner without a shell, and stays readable after its end."""
        target = f"={name}:"
        # tmux interprets a semicolon at the end of a word as the end of the command.
        argv = [re.sub(r";\Z", r"\;", word) for word in runner_argv(state_dir)]
        self._check(
            name,
            ["new-session", "-d", "-s", name, "-x", "160", "-y", "48", *argv]
            # A user's configuration may kill detached sessions.
            + [";", "set-option", "-t", target, "destroy-unattached", "off"]
            + [";", "set-window-option", "-t", target, "remain-on-exit", "on"],
            self._prefix,
        )

    def kill(self, name: str) -> None:
        """Kill exactly this session, not its processes; it may have ended meanwhile."""
        try:
            self._check(name, ["kill-session", "-t", f"={name}"])
        except TmuxError:
            if self.look(name) is not None:
                raise

    def screen(self, name: str) -> str:
        """The text in the pane, for error messages."""
        code, out, dummy = self._run("capture-pane", "-p", "-S", "-", "-t", f"={name}:")
        return "\n".join(line for line in out.splitlines() if line.strip()) if code == 0 else ""

    def _run(self, *words: str, prefix: Sequence[str] = ()) -> Tuple[int, str, str]:
        # From a folder that will not disappear.
        return bare.run([*prefix, self.path, *words], folder="/")

    def _check(self, name: str, words: Sequence[str], prefix: Sequence[str] = ()) -> None:
        for dummy in range(DYING_SERVERS):
            code, out, err = self._run(*words, prefix=prefix)
            # A server ends with its last session. A command at that moment gets this error; on a retry tmux starts a new server.
            if "server exited" not in err:
                break
        if code:
            why = (err or out).strip() or f"code {code}"
            raise TmuxError(f"session {name}: `{' '.join([self.path, *words[:3]])} ...` failed: {why}")
