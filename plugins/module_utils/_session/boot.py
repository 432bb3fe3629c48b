# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Having a session started again after a reboot: by a systemd user unit with linger, or else by crontab's @reboot.

What the entry runs is `main`, a program in the run folder. It starts what the last start was given, and nothing where the
run had come to its end or a user had stopped it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import shutil
import subprocess
import sys
from typing import Callable, List, NamedTuple, Tuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import SESSION, SESSION_FILES
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_bytes, write_whole
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tmux
from ansible_collections.nanochat.ddp.plugins.module_utils._session.record import (
    LAUNCH,
    Launch,
    Record,
    cut_short,
    label_of,
    launch_in,
    record_in,
)

SYSTEMD, CRON, NONE = "systemd", "cron", "none"
CRON_NAMES = ("cron", "crond", "cronie", "fcron", "busybox")
MARK = "# nanochat.ddp "
# How crontab says that there is none, in the places where it is no failure.
NO_CRONTAB = ("no crontab for", "can't open", "No such file or directory")
Run = Callable[[List[str]], Tuple[int, str, str]]


class BootError(Exception):
    """Says what could not be entered or taken out, and what the system said."""


class Entry(NamedTuple):
    """The session to start at boot, and where the entries about it lie."""

    name: str  # of the session
    program: str
    source: bytes  # of the program
    home: str

    @property
    def units(self) -> str:
        return os.path.join(self.home, ".config", "systemd", "user")

    @property
    def unit(self) -> str:
        return os.path.join(self.units, self.name + ".service")

    def old_units(self) -> List[str]:
        """Units for the same program: of this session, and of what it was called when this host had another rank."""
        found = glob.glob(os.path.join(glob.escape(self.units), "nanochat-*.service"))
        return [path for path in found if _quoted(self.program).encode() in read_bytes(path)]

    def unit_text(self) -> bytes:
        """tmux goes on after the program has ended; when the machine is shut down, all that runs in it is asked to end."""
        words = " ".join(_quoted(word) for word in (sys.executable, "-B", self.program))
        return (
            "[Unit]\nDescription=Starts %s again after a reboot (nanochat.ddp)\n\n"
            "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=%s\n\n"
            "[Install]\nWantedBy=default.target\n" % (self.name, words)
        ).encode()

    @property
    def cron_line(self) -> str:
        return "@reboot %s %s%s" % (_for_cron([sys.executable, "-B", self.program]), MARK, self.name)

    def is_old(self, line: str) -> bool:
        """Whether a line of the crontab is for this program, whatever its session was called."""
        command, mark, dummy = line.rpartition(" " + MARK)
        return bool(mark) and command.endswith(" " + _for_cron([self.program]))


def _for_cron(words: List[str]) -> str:
    # A percent sign is a newline to cron.
    return shlex.join(words).replace("%", "\\%")


def _quoted(word: str) -> str:
    return '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


# -- what is entered


def entered(run: Run, entry: Entry) -> str:
    """By what the session is started after a reboot now."""
    if read_bytes(entry.program) != entry.source:
        return NONE
    if read_bytes(entry.unit) == entry.unit_text() and run(["systemctl", "--user", "is-enabled", entry.name])[0] == 0:
        return SYSTEMD
    return CRON if entry.cron_line in _readable_crontab(run) else NONE


def possible(run: Run, user: str, cron_runs: bool, dry: bool) -> Tuple[str, str]:
    """How it would start at boot, and what was seen where nothing does. Enables lingering for the user, unless only checking."""
    seen = "its systemd does not answer this user"
    if run(["systemctl", "--user", "show-environment"])[0] == 0:
        lingers = "Linger=yes" in run(["loginctl", "show-user", user, "-p", "Linger"])[1].split()
        if lingers or dry or run(["loginctl", "enable-linger", user])[0] == 0:
            return SYSTEMD, ""
        seen = "systemd starts nothing for %s before login, and only root may change that" % user
    if run(["crontab", "-l"])[0] == 127:
        return NONE, seen + ", and there is no crontab"
    return (CRON, "") if cron_runs else (NONE, seen + ", and no cron is running")


def enter(run: Run, entry: Entry, way: str) -> None:
    """Have it started that way, and no other."""
    leave(run, entry, keep=way)
    write_whole(entry.program, entry.source, 0o600)
    if way == SYSTEMD:
        os.makedirs(os.path.dirname(entry.unit), exist_ok=True)
        write_whole(entry.unit, entry.unit_text(), 0o644)
        _must(run, ["systemctl", "--user", "daemon-reload"])
        _must(run, ["systemctl", "--user", "enable", entry.name])
    elif way == CRON:
        _write_crontab(run, entry, [entry.cron_line])


def leave(run: Run, entry: Entry, keep: str = NONE) -> bool:
    """Take out what is entered, but for what is to be kept; whether there was anything."""
    changed = False
    for unit in entry.old_units():
        if keep == SYSTEMD and unit == entry.unit:
            continue
        run(["systemctl", "--user", "disable", os.path.basename(unit)])
        os.unlink(unit)
        run(["systemctl", "--user", "daemon-reload"])
        changed = True
    if keep != CRON and any(entry.is_old(line) for line in _readable_crontab(run)):
        _write_crontab(run, entry, [])
        changed = True
    if keep == NONE and os.path.lexists(entry.program):
        os.unlink(entry.program)
    return changed


def _crontab(run: Run) -> List[str]:
    """The lines of the crontab; BootError where it cannot be read."""
    code, out, err = run(["crontab", "-l"])
    if code and not any(words in err for words in NO_CRONTAB):
        raise BootError("`crontab -l` failed, so the crontab was not changed: %s" % (err.strip() or "code %d" % code))
    return [] if code else out.splitlines()


def _readable_crontab(run: Run) -> List[str]:
    """The same; nothing of ours is in one that this user may not read."""
    with contextlib.suppress(BootError):
        return _crontab(run)
    return []


def _write_crontab(run: Run, entry: Entry, lines: List[str]) -> None:
    kept = [line for line in _crontab(run) if not entry.is_old(line)]
    fresh = entry.program + ".crontab"
    write_whole(fresh, ("\n".join([*kept, *lines]) + "\n").encode("utf-8", "surrogateescape"), 0o600)
    try:
        _must(run, ["crontab", fresh])
    finally:
        os.unlink(fresh)


def _must(run: Run, argv: List[str]) -> None:
    code, out, err = run(argv)
    if code:
        raise BootError("`%s` failed: %s" % (" ".join(argv), (err or out).strip() or "code %d" % code))


def cron_is_running() -> bool:
    """Whether a cron daemon runs on this host."""
    names = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            names.add(read_bytes("/proc/%s/comm" % entry).strip().decode("utf-8", "replace"))
    return bool(names & set(CRON_NAMES))


# -- what the entry runs


def launch_of(run_dir: str) -> Launch:
    """Arguments of the last start."""
    return launch_in(os.path.join(run_dir, SESSION_FILES, LAUNCH))


def runs(record: Record) -> bool:
    """Whether the session of a record is still there. The boot alone does not tell: a container keeps that of its machine."""
    same_boot = record.get("boot_id") == processes.boot_id()
    return same_boot and processes.alive(record.get("pid") or 0, record.get("pid_start"))


def to_start(run_dir: str) -> List[str]:
    """The command of a session that the machine's end has cut short; empty where nothing is to be started."""
    folder = os.path.join(run_dir, SESSION_FILES)
    launch, record = launch_of(run_dir), record_in(os.path.join(run_dir, SESSION))
    over = record.get("ended") is not None and not cut_short(record.get("exit_code"))
    stopped = record.get("stopped") or os.path.exists(os.path.join(folder, "stop"))
    if not launch.get("session") or not record or over or stopped or runs(record):
        return []
    return [sys.executable, "-B", "-E", "-s", os.path.join(folder, "runner.py"), folder]


def main(run_dir: str) -> None:
    """Start it."""
    argv = to_start(run_dir)
    if not argv:
        return

    def run(words: List[str]) -> Tuple[int, str, str]:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    launch = launch_of(run_dir)
    path = shutil.which("tmux", path=os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise SystemExit("tmux is not installed, so %s is not started again" % launch["session"])
    tmux.Tmux(run, path).start(str(launch["session"]), "%s.%s" % (label_of(run_dir), launch["id"]), run_dir, argv)
