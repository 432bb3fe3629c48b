# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The few words of tmux that a session needs; names always match exactly, and only what carries our label is touched."""

from __future__ import annotations

import re
from typing import Callable

Run = Callable[["list[str]"], "tuple[int, str, str]"]

# User options of the tmux session: by one we know it again, the other is for people.
_LABEL = "@nanochat_ddp"
_FOLDER = "@nanochat_ddp_folder"
DYING_SERVERS = 5  # met one after the other, before this is an error
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z")


class TmuxError(Exception):
    """Says what tmux was asked and what it answered."""


def check_name(name: str) -> str:
    """The name if tmux can address it without doubt: to tmux '.' and ':' separate windows and panes."""
    if not _NAME.match(name):
        raise TmuxError(f"{name!r} is not a session name: use letters, digits, '_' and '-', not starting with '-'")
    return name


class Tmux:
    """The user's default tmux server, so that `tmux attach -t NAME` finds the sessions."""

    def __init__(self, run: Run, path: str, prefix: list[str] | None = None) -> None:
        self._run = run
        self._path = path
        self._prefix = prefix or []  # what starts a server outside the login that we came by

    def exists(self, name: str) -> bool:
        """Whether there is a session of exactly this name."""
        code, dummy, err = self._run([self._path, "has-session", "-t", f"={name}"])
        if code and "version" in err:
            raise TmuxError(f"the running tmux server does not understand {self._path}: {err.strip()}")
        return code == 0

    def label(self, name: str) -> str:
        """The label that start() gave the session; empty for a session that somebody else started."""
        return self._option(name, _LABEL)

    def folder(self, name: str) -> str:
        """The folder for which start() was called."""
        return self._option(name, _FOLDER)

    def runner(self, name: str) -> int | None:
        """The process in the session's pane, None once it has ended (or there is no such session)."""
        code, out, dummy = self._run([self._path, "list-panes", "-t", f"={name}:", "-F", "#{pane_dead} #{pane_pid}"])
        dead, dummy, pid = out.strip().partition(" ")
        return int(pid) if code == 0 and dead == "0" and pid.isdigit() else None

    def start(self, name: str, label: str, folder: str, argv: list[str]) -> None:
        """A session that runs argv without a shell, and stays readable after its end."""
        target = f"={name}:"
        self._check(
            name,
            [*self._prefix, self._path, "new-session", "-d", "-s", name, "-x", "160", "-y", "48", *map(_literal, argv)]
            + [";", "set-option", "-t", target, _LABEL, label]
            + [";", "set-option", "-t", target, _FOLDER, _literal(folder)]
            # A user's own configuration may end sessions that nobody looks at.
            + [";", "set-option", "-t", target, "destroy-unattached", "off"]
            + [";", "set-window-option", "-t", target, "remain-on-exit", "on"],
        )

    def kill(self, name: str) -> None:
        """End exactly this session, not its processes; it may have ended since somebody looked."""
        try:
            self._check(name, [self._path, "kill-session", "-t", f"={name}"])
        except TmuxError:
            if self.exists(name):
                raise

    def screen(self, name: str) -> str:
        """The text in the pane, for error messages."""
        code, out, dummy = self._run([self._path, "capture-pane", "-p", "-S", "-", "-t", f"={name}:"])
        return "\n".join(line for line in out.splitlines() if line.strip()) if code == 0 else ""

    def _option(self, name: str, option: str) -> str:
        # The trailing colon makes old releases read the name as a session's for this command as well.
        code, out, dummy = self._run([self._path, "show-options", "-v", "-t", f"={name}:", option])
        return out.strip() if code == 0 else ""

    def _check(self, name: str, argv: list[str]) -> None:
        for dummy in range(DYING_SERVERS):
            code, out, err = self._run(argv)
            # A server ends with its last session. Whoever asks it just then gets this answer; asked again, tmux starts another.
            if "server exited" not in err:
                break
        if code:
            words = (err or out).strip() or f"code {code}"
            raise TmuxError(f"session {name}: `{' '.join(argv[:4])} ...` failed: {words}")


def ends_with_login(pid: int) -> bool:
    """Whether systemd counts this process to a login, so that it ends with it where logind kills."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return re.search(r"/session-[^/\n]+\.scope", file.read()) is not None
    except OSError:
        return False


def _literal(word: str) -> str:
    """tmux takes a semicolon at the end of a word for the end of the command."""
    return word[:-1] + "\\;" if word.endswith(";") else word
