# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts a session again after a reboot: by a unit of the user's systemd where the user lingers, or by crontab's @reboot.

The entry runs the session's runner with the word `boot`, which repeats the last launch, unless the run had ended or a user had stopped it.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import List, Optional, Tuple

from .._contract.run_folder import SESSION, SESSION_FILES
from .._kit import bare, processes
from .._kit.files import read_bytes, write_whole
from .._kit.logind import logind
from . import tmux
from .record import LAUNCH, cut_short, launch_in, record_in, runner_argv

SYSTEMD, CRON, NONE = "systemd", "cron", "none"
BOOT = "boot"
CRON_NAMES = ("cron", "crond", "cronie", "fcron", "busybox")
MARK = "# nanochat.ddp "
# crontab's ways to report a missing crontab, where that is no failure.
NO_CRONTAB = ("no crontab for", "No such file or directory")
# tmux continues after the program has ended; at shutdown, everything in it is asked to exit.
UNIT = "[Unit]\nDescription=Starts %s again after a reboot (nanochat.ddp)\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=%s\n"


class BootEntry:
    """The entry that starts a session at boot. An entry with another name that runs the same program is an earlier one, of another rank."""

    def __init__(self, name: str, run_dir: str) -> None:
        argv = [*runner_argv(run_dir), BOOT]
        self.name = name
        self.unit, self.link = _unit(name)
        # What only entries of this run folder contain.
        self.in_unit, self.in_cron = " ".join(map(_quoted, argv[-2:])), _for_cron(argv[-2:])
        self.unit_text = (UNIT % (name, " ".join(map(_quoted, argv)))).encode()
        # Entries of an earlier version run this program.
        self.earlier = Path(run_dir, ".boot.py")
        self.line = "@reboot %s %s%s" % (_for_cron(argv), MARK, name)

    def bring(self, wanted: Optional[bool], check: bool) -> Tuple[str, str, str]:
        """The means by which the session was, and now is, started after a reboot, and a warning if there is none; None changes nothing."""
        if wanted is None:
            return NONE, NONE, ""
        lines, unreadable = _crontab()
        has_unit = self.link.is_symlink() and read_bytes(str(self.unit)) == self.unit_text
        before = SYSTEMD if has_unit else CRON if self.line in lines else NONE
        user = processes.user_name(os.getuid())
        after = _possible(user, check) if wanted else NONE
        why = "neither systemd nor cron starts programs of %s at boot" % user if wanted and after == NONE else ""
        try:
            if after == CRON and unreadable:
                raise OSError(unreadable)
            if not check and (after != before or after == NONE):
                self._start_by(after, lines)
        except OSError as error:
            after, why = NONE, str(error)
        remedy = (
            "`sudo loginctl enable-linger %s` on that host makes that possible, or start it with the playbook nanochat.ddp.join"
            % user
        )
        return before, after, "%s will not start after a reboot: %s; %s" % (self.name, why, remedy) if why else ""

    def _start_by(self, way: str, lines: List[str]) -> None:
        """Start it this way and no other, or (NONE) not at all; lines: those of the crontab now."""
        for path in self.unit.parent.glob("nanochat-*.service"):
            text = read_bytes(str(path))
            if self.in_unit.encode() in text or _quoted(str(self.earlier)).encode() in text:
                _remove(*_unit(path.stem))
        if way == SYSTEMD:
            self.link.parent.mkdir(parents=True, exist_ok=True)
            write_whole(str(self.unit), self.unit_text, 0o644)
            _remove(self.link)
            self.link.symlink_to(self.unit)
        ours = [" %s %s" % (program, MARK) for program in (self.in_cron, _for_cron([str(self.earlier)]))]
        others = [line for line in lines if not any(one in line for one in ours)]
        wanted = others + ([self.line] if way == CRON else [])
        if wanted != lines:
            _write_crontab(wanted)
        _remove(self.earlier)


def _possible(user: str, dry: bool) -> str:
    """How a program of this user can be started at boot. Enables lingering, unless only checking."""
    has_systemd = _run("systemctl", "--user", "show-environment")[0] == 0
    if has_systemd and (logind(user).lingers or dry or _run("loginctl", "enable-linger", user)[0] == 0):
        return SYSTEMD
    return CRON if _run("crontab", "-l")[0] != 127 and cron_is_running() else NONE


def _crontab() -> Tuple[List[str], str]:
    """The lines of the user's crontab, or why it cannot be read."""
    code, out, err = _run("crontab", "-l")
    if code and not any(words in err for words in NO_CRONTAB):
        return [], "`crontab -l` failed, so the crontab was not changed: %s" % (err.strip() or "code %d" % code)
    return [] if code else out.splitlines(), ""


def _write_crontab(lines: List[str]) -> None:
    # Not in the run folder, whose disk may be full.
    with tempfile.NamedTemporaryFile(prefix="nanochat-crontab-") as fresh:
        fresh.write("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
        fresh.flush()
        code, out, err = _run("crontab", fresh.name)
    if code:
        raise OSError("`crontab %s` failed: %s" % (fresh.name, (err or out).strip() or "code %d" % code))


def _run(*argv: str) -> Tuple[int, str, str]:
    return bare.run(argv, {"LC_ALL": "C"})


def _unit(name: str) -> Tuple[Path, Path]:
    """A unit of the user's systemd, and the link by which it starts."""
    folder, file = Path.home() / ".config/systemd/user", "nanochat-%s.service" % name.removeprefix("nanochat-")
    return folder / file, folder / "default.target.wants" / file


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


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


def restart(run_dir: str) -> None:
    """After a reboot, start the session again if it was cut short."""
    launch = launch_in(os.path.join(run_dir, SESSION_FILES, LAUNCH))
    if launch.get("session") and was_cut_short(run_dir):
        tmux.Tmux().start(launch["session"], launch["id"], run_dir)
