"""Reports where a process is that seems to be stuck.

To ask, create a file dump-request-rankN in the run folder. The heartbeat's thread finds it within a second and writes
dump-rankN.json, with the Python stack of every thread, then removes the request. It works while the main thread waits in a
collective, and needs no signal and no debugger.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from nanochat.kit.connections import connections

HANG_UP = "hang-up-rank"


def oom_kills() -> int | None:
    """This kernel's number of OOM kills; None if unknown.

    A killed process cannot say why. If this number has grown since its last heartbeat, that was why.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, dummy, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None


def memory_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def hang_up(run_dir: Path, rank: int) -> str | None:
    """Close all connections if hang-up-rankN exists, and return the reason in it, so that a wait for a frozen or unreachable
    rank fails with an error."""
    request = run_dir / f"{HANG_UP}{rank}"
    if not request.exists():
        return None
    why = request.read_text(encoding="utf-8", errors="replace")
    request.unlink(missing_ok=True)
    for one in connections():
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    return why


def answer_request(run_dir: Path, rank: int) -> bool:
    """Answer a pending request; True if there was one."""
    request = run_dir / f"dump-request-rank{rank}"
    if not request.exists():
        return False
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        # The innermost frame last.
        names.get(ident, str(ident)): [
            f"{one.filename}:{one.lineno} in {one.name}: {one.line}" for one in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
    answer = {"time": time.time(), "pid": os.getpid(), "stacks": stacks}
    part = run_dir / f"dump-rank{rank}.json.part"
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(run_dir / f"dump-rank{rank}.json")
    request.unlink(missing_ok=True)
    return True
