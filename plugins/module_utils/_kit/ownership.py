# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether another user of this host could change what this user runs: by owners and modes of a path and all folders above it."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from pathlib import Path
from typing import List, Tuple

from .files import read_text
from .processes import user_name

# File systems whose owners and modes are made up by their mount options.
WITHOUT_MODES = ("vfat", "exfat", "msdos", "ntfs", "ntfs3", "fuseblk", "drvfs", "cifs", "smb3", "smbfs", "hfsplus")
ROOT = 0


def exposure(path: str, owned: bool = True) -> str:
    """Who could change what is run from a path, and the command that prevents it; empty if only this user and root can.

    owned: the path itself, if it exists, must be this user's or root's.
    """
    path, real = os.path.abspath(path), os.path.realpath(path)
    if mount_of(real)[0] in WITHOUT_MODES:
        return ""
    me = user_name(os.getuid())
    for place in dict.fromkeys(str(one) for end in (real, path) for one in (end, *Path(end).parents)):
        try:
            found = os.stat(place)
        except OSError:
            continue
        sudo = "" if os.getuid() in (found.st_uid, ROOT) else "sudo "
        if owned and place == real and found.st_uid not in (os.getuid(), ROOT):
            owner = user_name(found.st_uid)
            return f"{place} belongs to {owner}, who could change what {me} runs there: {sudo}chown -R {me}: {place}"
        # In a folder above with the sticky bit, nobody renames what belongs to others.
        above, who = place not in (real, path), ""
        if found.st_mode & stat.S_IWOTH:
            who = "every user"
        elif found.st_mode & stat.S_IWGRP:
            # Many systems give each user a group of his own, and let it write.
            who = " and ".join(_members(found.st_gid)[:3])
        if who and not (above and found.st_mode & stat.S_ISVTX):
            return f"{who} may write to {place} and so change what {me} runs: {sudo}chmod {'+t' if above else 'go-w'} {place}"
    return ""


def exposure_of_run(run_dir: str) -> str:
    """The same of a run's folder and of the base folder around it."""
    runs, base = os.path.dirname(run_dir), os.path.dirname(os.path.dirname(run_dir))
    return (exposure(base) if os.path.basename(runs) == "runs" else "") or exposure(run_dir)


def _members(gid: int) -> List[str]:
    """The members of a group besides this user and root."""
    try:
        named = grp.getgrgid(gid).gr_mem
    except KeyError:
        named = []
    by_default = [one.pw_name for one in pwd.getpwall() if one.pw_gid == gid]
    return sorted({*named, *by_default} - {user_name(os.getuid()), user_name(ROOT)})


def mount_of(path: str, mounts: str = "/proc/self/mountinfo") -> Tuple[str, str]:
    """(type, source) of the file system that holds a path."""
    best, found = "", ("", "")
    for line in read_text(mounts).splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split()
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, (right.split()[0], ([*right.split(), ""])[1])
    return found
