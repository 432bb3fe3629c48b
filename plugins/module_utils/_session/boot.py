# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts a session again after a reboot: by a unit of the user's systemd, which starts before a login where the user lingers.

The unit runs the session's runner with the word `boot`, which repeats the last launch, unless the run had ended or a user had stopped it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import List, Tuple

from .._contract.run_folder import SESSION_FILES
from .._kit import bare, processes
from .._kit.files import read_bytes, write_whole
from .._kit.logind import logind
from . import tmux
from .record import cut_short, launch_in, record_in, runner_argv

SYSTEMD, NONE = "systemd", "none"
BOOT = "boot"
# An early version wrote a line into the crontab where there was no such systemd.
WITHOUT_LINE = (
    'lines=$(crontab -l) && case $lines in *"$1"*) printf "%s\\n" "$lines" | grep -vF -e "$1" | crontab -;; esac'
)
# tmux continues after the program has ended; at shutdown, everything in it is asked to exit.
UNIT = "[Unit]\nDescription=Starts %s again after a reboot (nanochat.ddp)\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=%s\n"


def at_boot(name: str, run_dir: str, wanted: bool, check: bool = False) -> Tuple[str, str, str]:
    """The means by which a session was, and now is, started after a reboot, and a warning if there is none."""
    unit, link = _unit(name)
    argv = [*runner_argv(run_dir), BOOT]
    content = (UNIT % (name, " ".join(map(_quoted, argv)))).encode()
    before = SYSTEMD if link.is_symlink() and read_bytes(str(unit)) == content else NONE
    after, user = NONE, processes.user_name(os.getuid())
    if wanted and bare.run(["systemctl", "--user", "show-environment"])[0] == 0:
        lingers = logind(user).lingers or check or bare.run(["loginctl", "enable-linger", user])[0] == 0
        after = SYSTEMD if lingers else NONE
    why = "systemd starts no programs of %s at boot" % user if wanted and after == NONE else ""
    try:
        if not check and (after != before or after == NONE):
            # One with another name that runs the same program is an earlier one, of another rank. Only units of this run folder
            # contain the last two words.
            own = " ".join(map(_quoted, argv[-2:])).encode()
            for path in unit.parent.glob("nanochat-*.service"):
                if own in read_bytes(str(path)):
                    for one in _unit(path.stem):
                        one.unlink(missing_ok=True)
            # A percent sign is a newline to cron.
            in_cron = " %s # nanochat.ddp " % shlex.join(argv[-2:]).replace("%", "\\%")
            bare.run(["sh", "-c", WITHOUT_LINE, "sh", in_cron])
            if after == SYSTEMD:
                link.parent.mkdir(parents=True, exist_ok=True)
                write_whole(str(unit), content, 0o644)
                link.unlink(missing_ok=True)
                link.symlink_to(unit)
    except OSError as error:
        after, why = NONE, str(error)
    remedy = "run `sudo loginctl enable-linger %s` on that host, or the playbook nanochat.ddp.join after a reboot"
    said = "%s will not start after a reboot: %s; %s" % (name, why, remedy % user)
    return before, after, said if why else ""


def _unit(name: str) -> Tuple[Path, Path]:
    """A unit of the user's systemd, and the link by which it starts."""
    folder, file = Path.home() / ".config/systemd/user", "nanochat-%s.service" % name.removeprefix("nanochat-")
    return folder / file, folder / "default.target.wants" / file


def _quoted(word: str) -> str:
    return '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


def was_cut_short(run_dir: str) -> bool:
    """Whether a session had neither ended nor been stopped, and is gone."""
    record = record_in(run_dir)
    over = record.get("ended") is not None and not cut_short(record.get("exit_code"))
    stopped = record.get("stopped") or os.path.exists(os.path.join(run_dir, SESSION_FILES, "stop"))
    # The boot id alone does not tell: a container keeps its machine's.
    same_boot = record.get("boot_id") == processes.boot_id()
    runs = same_boot and processes.alive(record.get("pid") or 0, record.get("pid_start"))
    return bool(record) and not (over or stopped or runs)


def restart(run_dir: str) -> None:
    """After a reboot, start the session again if it was cut short."""
    launch = launch_in(run_dir)
    if launch.get("session") and was_cut_short(run_dir):
        tmux.Tmux().start(launch["session"], run_dir)


def end_sessions(folders: List[str]) -> None:
    """End the sessions of finished runs in these folders, and what starts them after a reboot: a stop leaves it to the next start."""
    server = tmux.Tmux()
    for folder in folders:
        name, files = record_in(folder).get("session"), os.path.join(folder, SESSION_FILES)
        with contextlib.suppress(tmux.TmuxError):
            if name and server.other(tmux.check_name(name), files) == "":
                server.kill(name)
        if os.path.isdir(files):
            at_boot("", folder, wanted=False)
