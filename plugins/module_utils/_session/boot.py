# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Restarts a session after a reboot: by a systemd user unit with lingering, or by crontab's @reboot.

The entry runs `main`, a program in the run folder. It repeats the last launch, unless the run
had ended or a user had stopped it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import List, Optional, Tuple

from .._contract.run_folder import BOOT, SESSION, SESSION_FILES
from .._kit import bare, host_code, processes
from .._kit.files import read_bytes, write_whole
from . import tmux
from .record import LAUNCH, cut_short, label_of, launch_in, record_in

SYSTEMD, CRON, NONE = "systemd", "cron", "none"
CRON_NAMES = ("cron", "crond", "cronie", "fcron", "busybox")
MARK = "# nanochat.ddp "
# crontab's ways to report a missing crontab, where that is no failure.
NO_CRONTAB = ("no crontab for", "No such file or directory")
# tmux continues after the program has ended; at shutdown, everything in it is asked to exit.
UNIT = "[Unit]\nDescription=Starts %s again after a reboot (nanochat.ddp)\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=%s\n"


class BootError(Exception):
    """The crontab could not be changed; contains the system's message."""


class BootEntry:
    """The entry that starts a session at boot. An entry with another name that runs the same program is an earlier one, of another rank."""

    def __init__(self, name: str, run_dir: str) -> None:
        self.name, self.run_dir, self.program = name, run_dir, os.path.join(run_dir, BOOT)

    @functools.cached_property
    def source(self) -> bytes:
        """The program."""
        return host_code.program(__name__, "main", self.run_dir).encode()

    def bring(self, wanted: Optional[bool], check: bool) -> Tuple[str, str, str]:
        """The means by which the session was, and now is, started after a reboot, and a warning if there is none; None changes nothing."""
        if wanted is None or not (wanted or os.path.lexists(self.program)):
            return NONE, NONE, ""
        before, user = self._way(), processes.user_name(os.getuid())
        after = self._possible(user, check) if wanted else NONE
        why = "neither systemd nor cron starts programs of %s at boot" % user if wanted and after == NONE else ""
        try:
            if not check and (after != before or after == NONE):
                self._start_by(after)
        except (BootError, OSError) as error:
            after, why = NONE, "%s" % error
        remedy = (
            "`sudo loginctl enable-linger %s` on that host makes that possible, or start it with the playbook nanochat.ddp.join"
            % user
        )
        return before, after, "%s will not start after a reboot: %s; %s" % (self.name, why, remedy) if why else ""

    def _way(self) -> str:
        unit, link = _unit(self.name)
        if read_bytes(self.program) != self.source:
            return NONE
        if link.is_symlink() and read_bytes(str(unit)) == self._unit_text():
            return SYSTEMD
        return CRON if self._line() in self._crontab()[0] else NONE

    def _possible(self, user: str, dry: bool) -> str:
        """How it can be started. Enables lingering for the user, unless only checking."""
        if _run("systemctl", "--user", "show-environment")[0] == 0:
            lingers = "Linger=yes" in _run("loginctl", "show-user", user, "-p", "Linger")[1].split()
            if lingers or dry or _run("loginctl", "enable-linger", user)[0] == 0:
                return SYSTEMD
        return CRON if _run("crontab", "-l")[0] != 127 and cron_is_running() else NONE

    def _start_by(self, way: str) -> None:
        """Start it this way and no other, or (NONE) not at all."""
        lines, unreadable = self._crontab()
        if unreadable and way == CRON:
            raise BootError(unreadable)
        for path in Path.home().glob(".config/systemd/user/nanochat-*.service"):
            if _quoted(self.program).encode() in read_bytes(str(path)):
                _remove(*_unit(path.stem))
        unit, link = _unit(self.name)
        if way == SYSTEMD:
            link.parent.mkdir(parents=True, exist_ok=True)
            write_whole(str(unit), self._unit_text(), 0o644)
            _remove(link)
            link.symlink_to(unit)
        ours = " %s %s" % (_for_cron([self.program]), MARK)
        wanted = [line for line in lines if ours not in line] + ([self._line()] if way == CRON else [])
        if wanted != lines:
            self._write_crontab(wanted)
        if way == NONE:
            _remove(Path(self.program))
        else:
            write_whole(self.program, self.source, 0o600)

    def _unit_text(self) -> bytes:
        words = " ".join(_quoted(word) for word in (sys.executable, "-B", self.program))
        return (UNIT % (self.name, words)).encode()

    def _line(self) -> str:
        return "@reboot %s %s%s" % (_for_cron([sys.executable, "-B", self.program]), MARK, self.name)

    def _crontab(self) -> Tuple[List[str], str]:
        """The lines of the user's crontab, or why it cannot be read."""
        code, out, err = _run("crontab", "-l")
        if code and not any(words in err for words in NO_CRONTAB):
            return [], "`crontab -l` failed, so the crontab was not changed: %s" % (err.strip() or "code %d" % code)
        return [] if code else out.splitlines(), ""

    def _write_crontab(self, lines: List[str]) -> None:
        # Not beside the program, whose disk may be full.
        with tempfile.NamedTemporaryFile(prefix="nanochat-crontab-") as fresh:
            fresh.write("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
            fresh.flush()
            code, out, err = _run("crontab", fresh.name)
        if code:
            raise BootError("`crontab %s` failed: %s" % (fresh.name, (err or out).strip() or "code %d" % code))


def _run(*argv: str) -> Tuple[int, str, str]:
    return bare.run(argv, {"LC_ALL": "C"})


def _unit(name: str) -> Tuple[Path, Path]:
    """A unit of the user's systemd, and the link by which it starts."""
    folder, file = Path.home() / ".config/systemd/user", "nanochat-%s.service" % name.removeprefix("nanochat-")
    return folder / file, folder / "default.target.wants" / file


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _for_cron(words: List[str]) -> str:
    # A percent sign is a newline to cron.
    return shlex.join(words).replace("%", "\\%")


def _quoted(word: str) -> str:
    return '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


def cron_is_running() -> bool:
    """Whether a cron daemon runs on this host."""
    return any(one.name in CRON_NAMES for one in processes.processes().values())


def was_cut_short(run_dir: str) -> bool:
    """Whether a session had neither ended nor been stopped, and is gone."""
    record = record_in(os.path.join(run_dir, SESSION))
    over = record.get("ended") is not None and not cut_short(record.get("exit_code"))
    stopped = record.get("stopped") or os.path.exists(os.path.join(run_dir, SESSION_FILES, "stop"))
    # The boot id alone does not tell: a container keeps its machine's.
    same_boot = record.get("boot_id") == processes.boot_id()
    runs = same_boot and processes.alive(record.get("pid") or 0, record.get("pid_start"))
    return bool(record) and not (over or stopped or runs)


def main(run_dir: str) -> None:
    """The program of the entry."""
    folder = os.path.join(run_dir, SESSION_FILES)
    launch = launch_in(os.path.join(folder, LAUNCH))
    if not launch.get("session") or not was_cut_short(run_dir):
        return
    path = shutil.which("tmux", path=os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise SystemExit("tmux is not installed, so %s is not started again" % launch["session"])
    argv = [sys.executable, "-B", "-E", "-s", os.path.join(folder, "runner.py"), folder]
    tmux.Tmux(bare.run, path).start(launch["session"], "%s.%s" % (label_of(run_dir), launch["id"]), run_dir, argv)
