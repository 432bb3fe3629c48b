# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Restarts a session after a reboot: by a systemd user unit with lingering, or by crontab's @reboot.

The entry runs `main`, a program in the run folder. It repeats the last launch, unless the run
had ended or a user had stopped it.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import shutil
import sys
import tempfile
from typing import Callable, Dict, List, NamedTuple, Tuple

from .._contract.run_folder import BOOT, SESSION, SESSION_FILES
from .._kit import bare, host_code, processes
from .._kit.files import read_bytes, write_whole
from . import tmux
from .record import LAUNCH, Launch, Record, cut_short, label_of, launch_in, record_in

SYSTEMD, CRON, NONE = "systemd", "cron", "none"
CRON_NAMES = ("cron", "crond", "cronie", "fcron", "busybox")
MARK = "# nanochat.ddp "
# crontab's ways to report a missing crontab, where that is no failure.
NO_CRONTAB = ("no crontab for", "No such file or directory")
Run = Callable[[List[str]], Tuple[int, str, str]]


class BootError(Exception):
    """An entry could not be added or removed; contains the system's message."""


class BootEntry(NamedTuple):
    """The session to start at boot, and its entries' names."""

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
        """Units for the same program: of this session, and of its names under other ranks."""
        found = glob.glob(os.path.join(glob.escape(self.units), "nanochat-*.service"))
        return [path for path in found if _quoted(self.program).encode() in read_bytes(path)]

    def unit_text(self) -> bytes:
        """tmux continues after the program has ended; at shutdown, everything in it is asked to exit."""
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
        """Whether a crontab line is for this program, under any session name."""
        command, mark, dummy = line.rpartition(" " + MARK)
        return bool(mark) and command.endswith(" " + _for_cron([self.program]))


def _for_cron(words: List[str]) -> str:
    # A percent sign is a newline to cron.
    return shlex.join(words).replace("%", "\\%")


def _quoted(word: str) -> str:
    return '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


# -- current and possible entries


def entered(run: Run, entry: BootEntry) -> str:
    """The mechanism that starts the session after a reboot now."""
    if read_bytes(entry.program) != entry.source:
        return NONE
    if read_bytes(entry.unit) == entry.unit_text() and run(["systemctl", "--user", "is-enabled", entry.name])[0] == 0:
        return SYSTEMD
    return CRON if entry.cron_line in _readable_crontab(run) else NONE


def possible(run: Run, user: str, cron_runs: bool, dry: bool) -> Tuple[str, str]:
    """How it would start at boot, or why nothing does. Enables lingering for the user, unless only checking."""
    seen = "its systemd does not answer this user"
    if run(["systemctl", "--user", "show-environment"])[0] == 0:
        lingers = "Linger=yes" in run(["loginctl", "show-user", user, "-p", "Linger"])[1].split()
        if lingers or dry or run(["loginctl", "enable-linger", user])[0] == 0:
            return SYSTEMD, ""
        seen = "systemd starts nothing for %s before login, and only root may change that" % user
    if run(["crontab", "-l"])[0] == 127:
        return NONE, seen + ", and there is no crontab"
    return (CRON, "") if cron_runs else (NONE, seen + ", and no cron is running")


def enter(run: Run, entry: BootEntry, way: str) -> None:
    """Start it that way, and no other."""
    leave(run, entry, keep=way)
    write_whole(entry.program, entry.source, 0o600)
    if way == SYSTEMD:
        os.makedirs(os.path.dirname(entry.unit), exist_ok=True)
        write_whole(entry.unit, entry.unit_text(), 0o644)
        _must(run, ["systemctl", "--user", "daemon-reload"])
        _must(run, ["systemctl", "--user", "enable", entry.name])
    elif way == CRON:
        _write_crontab(run, entry, [entry.cron_line])


def leave(run: Run, entry: BootEntry, keep: str = NONE) -> bool:
    """Remove entries, except the one to keep; returns whether there were any."""
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
    """The crontab's lines; BootError if unreadable."""
    code, out, err = run(["crontab", "-l"])
    if code and not any(words in err for words in NO_CRONTAB):
        raise BootError("`crontab -l` failed, so the crontab was not changed: %s" % (err.strip() or "code %d" % code))
    return [] if code else out.splitlines()


def _readable_crontab(run: Run) -> List[str]:
    """The same; an unreadable crontab contains nothing of ours."""
    with contextlib.suppress(BootError):
        return _crontab(run)
    return []


def _write_crontab(run: Run, entry: BootEntry, lines: List[str]) -> None:
    kept = [line for line in _crontab(run) if not entry.is_old(line)]
    # Not beside the program, whose disk may be full.
    with tempfile.NamedTemporaryFile(prefix="nanochat-crontab-") as fresh:
        fresh.write(("\n".join([*kept, *lines]) + "\n").encode("utf-8", "surrogateescape"))
        fresh.flush()
        _must(run, ["crontab", fresh.name])


def _must(run: Run, argv: List[str]) -> None:
    code, out, err = run(argv)
    if code:
        raise BootError("`%s` failed: %s" % (" ".join(argv), (err or out).strip() or "code %d" % code))


def cron_is_running() -> bool:
    """Whether a cron daemon runs on this host."""
    return any(one.name in CRON_NAMES for one in processes.processes().values())


def session_boot(name: str, state_dir: str, state: str = "present", check: bool = False) -> Dict[str, object]:
    """Start a session of tmux_session after a reboot too (state: `present`), or no longer (`absent`), or tell what that would change.

    If nothing can start it, a warning says what is missing, since the run goes on without.
    """
    tmux.check_name(name)
    folder = os.path.abspath(state_dir)
    source = host_code.program(__name__, "main", folder).encode("utf-8")
    entry = BootEntry(name, os.path.join(folder, BOOT), source, os.path.expanduser("~"))
    before, wanted, missing = entered(run_tool, entry), NONE, ""
    user = processes.user_name(os.getuid())
    if state == "present":
        wanted, missing = possible(run_tool, user, cron_is_running(), check)
        try:
            if wanted not in (NONE, before) and not check:
                enter(run_tool, entry, wanted)
        except (BootError, OSError) as error:
            wanted, missing = NONE, f"{error}"
    if not check and wanted == NONE:
        leave(run_tool, entry)
    diff = {
        "before": f"started by: {before}\n",
        "after": f"started by: {wanted}\n",
        "before_header": name,
        "after_header": name,
    }
    warning = (
        f"{name} will not start after a reboot: {missing}; `sudo loginctl enable-linger {user}` on that "
        "host makes that possible, or start it with the playbook nanochat.ddp.join"
    )
    return {"changed": wanted != before, "way": wanted, "diff": diff, "warnings": [warning] if missing else []}


def run_tool(argv: List[str]) -> Tuple[int, str, str]:
    """Run a tool of the host from a folder that will not disappear."""
    program = bare.find(argv[0])
    return bare.run([program, *argv[1:]], folder="/") if program else (127, "", f"{argv[0]} is not installed")


# -- the program of the entry


def launch_of(run_dir: str) -> Launch:
    """Arguments of the last launch."""
    return launch_in(os.path.join(run_dir, SESSION_FILES, LAUNCH))


def runs(record: Record) -> bool:
    """Whether a recorded session is still alive. The boot id alone does not tell: a container keeps its machine's."""
    same_boot = record.get("boot_id") == processes.boot_id()
    return same_boot and processes.alive(record.get("pid") or 0, record.get("pid_start"))


def to_start(run_dir: str) -> List[str]:
    """The command of a session that the shutdown cut short; empty if there is nothing to start."""
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
    launch = launch_of(run_dir)
    path = shutil.which("tmux", path=os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise SystemExit("tmux is not installed, so %s is not started again" % launch["session"])
    tmux.Tmux(bare.run, path).start(str(launch["session"]), "%s.%s" % (label_of(run_dir), launch["id"]), run_dir, argv)
