# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes and listening ports of this host, read from /proc.

Pids are reused, so a process is identified by its pid and the clock tick at which it
started, and across reboots by the kernel's boot id too. Processes that end while being read are skipped.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import sys
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

from .files import paths_in, read_bytes, read_text

# Every process of a session has this variable, which tells it from lookalikes.
SESSION_VARIABLE = "NANOCHAT_DDP_SESSION"
# Tells a keeper that its runner restarted it after it died.
RESTARTED_VARIABLE = "NANOCHAT_KEEPER_RESTARTED"
# State of a listening socket in /proc/net/tcp.
_LISTEN = "0A"
# Name of preflight's process that answers on the job's ports, to recognise it after an interrupted play.
PORT_CHECK = "nanochat-check"
# The rehearsal's all-reduce, in a command line.
GLOO_CHECK = "scripts.gloo_check"
# Name of a rank; a forked one has the command line and environment of the process that forked it.
RANK_NAME = "nanochat-rank"


class Process(NamedTuple):
    """One process; `marker` is its session, if its environment may be read."""

    pid: int
    ppid: int
    uid: int
    start: int  # clock ticks after boot
    state: str  # the kernel's letter: R, S, D, T, Z ...
    argv: tuple[str, ...]
    name: str
    marker: str | None = None
    worker: bool = False  # has torchrun's variables for a worker, or a rank's name
    run: str | None = None  # the run of that session

    @property
    def command(self) -> str:
        """The command line for people; kernel threads and zombies have none, so their name is shown in brackets."""
        if self.name == PORT_CHECK:
            return PORT_CHECK  # it has the command line of the module that forked it
        return " ".join(self.argv) or f"[{self.name}]"

    @property
    def user(self) -> str:
        """The owner's name, or user id if it has none."""
        return user_name(self.uid)


def is_check(command: str | None) -> bool:
    """Whether it is a test of preflight or the rehearsal, which ends within seconds."""
    return command == PORT_CHECK or GLOO_CHECK in (command or "").split()


class ListeningSocket(NamedTuple):
    """One listening socket; the process is None if this user may not see it."""

    port: int
    address: str
    uid: int
    process: Process | None


def user_name(uid: int) -> str:
    """The name of a user id, or the id itself if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def boot_id(proc: str = "/proc") -> str:
    """Changes with every boot, so it shows whether the pids in a file are from this boot."""
    return _read(os.path.join(proc, "sys/kernel/random/boot_id")).decode("ascii").strip()


def process(pid: int, proc: str = "/proc") -> Process | None:
    """One process, or None if this pid does not exist (any more)."""
    folder = os.path.join(proc, str(pid))
    try:
        name, fields = _stat(folder)
        # The folder of a non-dumpable process belongs to root, so read the status.
        uid = int(_read(os.path.join(folder, "status")).partition(b"\nUid:")[2].split()[0])
        argv = _read(os.path.join(folder, "cmdline")).rstrip(b"\0")
        words = tuple(os.fsdecode(word) for word in argv.split(b"\0")) if argv else ()
        # The initial environment; empty if unreadable.
        entries = (one.partition(b"=") for one in read_bytes(os.path.join(folder, "environ")).split(b"\0"))
        variables = {os.fsdecode(key): os.fsdecode(value) for key, equals, value in entries if equals}
        again = _stat(folder)[1]
    except (OSError, ValueError, IndexError):
        return None
    if again[19] != fields[19]:
        return None  # another process got the pid between the reads
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        uid=uid,
        start=int(fields[19]),
        state=fields[0],
        argv=words,
        name=name,
        marker=variables.get(SESSION_VARIABLE),
        worker="TORCHELASTIC_RUN_ID" in variables or name == RANK_NAME,
        run=_run_of(variables, words),
    )


def processes(proc: str = "/proc") -> dict[int, Process]:
    """All processes that this user can see, by pid."""
    found = (process(pid, proc) for pid in _pids(proc))
    return {one.pid: one for one in found if one is not None}


def _pids(proc: str) -> list[int]:
    return [int(entry) for entry in os.listdir(proc) if entry.isdigit()]


def live_runs(proc: str = "/proc") -> set[str]:
    """The names of all runs with a live process on this host, whoever started it; root sees them all."""
    return {one.run for one in processes(proc).values() if one.run}


def alive(pid: int, start: int | None, proc: str = "/proc") -> bool:
    """Whether the process that started at this tick (None: any with this pid) still runs; zombies do not count."""
    try:
        fields = _stat(os.path.join(proc, str(pid)))[1]
    except (OSError, ValueError, IndexError):
        return False
    return start in (None, int(fields[19])) and fields[0] not in ("Z", "X")


def start_ticks(pid: int, proc: str = "/proc") -> int:
    """When the process started; OSError if it does not exist."""
    return int(_stat(os.path.join(proc, str(pid)))[1][19])


def parents_of_all(proc: str = "/proc") -> dict[int, int]:
    """The parent of every pid, which takes far less time than all of each process."""
    found = {}
    for pid in _pids(proc):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[pid] = int(_stat(os.path.join(proc, str(pid)))[1][1])
    return found


def descendants(parents: Mapping[int, int], roots: Iterable[int]) -> set[int]:
    """The pids of all descendants of the roots, without the roots."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def port_holders(ports: Iterable[int], proc: str = "/proc") -> list[ListeningSocket]:
    """Processes that listen on these TCP ports, once per address."""
    wanted = set(ports)
    sockets = [found for found in _listening(proc) if found[1] in wanted]
    owners = _socket_owners({found[3] for found in sockets}, proc) if sockets else {}
    return [
        ListeningSocket(port, address, uid, process(owners[inode], proc) if inode in owners else None)
        for address, port, uid, inode in dict.fromkeys(sockets)
    ]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _stat(folder: str) -> tuple[str, list[str]]:
    """The name and the fields from the third on; the name may contain spaces and brackets."""
    text = _read(os.path.join(folder, "stat")).decode("utf-8", "surrogateescape")
    head, tail = text.rsplit(")", 1)
    return head.split("(", 1)[1], tail.split()


def _run_of(variables: dict[str, str], argv: Sequence[str] = ()) -> str | None:
    """The run of a session's process: from its environment, or from its command line if it is another user's."""
    folder = variables.get("NANOCHAT_BASE_DIR", "").rstrip("/") if SESSION_VARIABLE in variables else ""
    if argv and argv[-1].endswith("/.keeper/keeper.py"):
        folder = folder or argv[-1].rpartition("/.keeper/")[0]
    named = [word[len("--run=") :] for word in argv if word.startswith("--run=")]
    is_ours = any(word.startswith("scripts.") for word in argv)
    return os.path.basename(folder) or (named[0] if named and is_ours else None)


def _listening(proc: str) -> Iterator[tuple[str, int, int, str]]:
    """(address, port, uid, inode) of every listening TCP socket of both families."""
    for name in ("tcp", "tcp6"):
        # A kernel without this family has no such file.
        for line in read_text(os.path.join(proc, "net", name)).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                # Words in the host's byte order.
                words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                yield socket.inet_ntop(family, b"".join(words)), int(port, 16), int(fields[7]), fields[9]


def _socket_owners(inodes: set[str], proc: str) -> dict[str, int]:
    """The process that has each socket open; of several (a parent and its child) the one with the smallest pid."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, int] = {}
    for pid in sorted(_pids(proc)):
        # Another user's open files are unknown; one may be closed meanwhile.
        for path in paths_in(os.path.join(proc, str(pid), "fd")):
            with contextlib.suppress(OSError):
                if (link := os.readlink(path)) in wanted:
                    owners.setdefault(wanted[link], pid)
    return owners
