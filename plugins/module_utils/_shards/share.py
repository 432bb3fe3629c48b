# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts, finds and stops the short-lived server of a folder's files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple, TypedDict, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import number
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object, write_json, write_whole
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    ShardsError,
    remove_tree,
)

SHARE = ".share"
START_SECONDS = 15
STOP_SECONDS = 10  # for each of the two signals


class ServerSettings(NamedTuple):
    """The config of a server."""

    host: str
    folder: str
    address: str
    low: int
    high: int
    allow: list[str]
    secret: str
    lifetime: int
    idle: int


class ServerState(TypedDict, total=False):
    """A server's state file; empty if there is none."""

    pid: int
    pid_start: int
    address: str
    port: int
    served: dict[str, int]
    error: str
    ended: float


def place_of(folder: str, secret: str) -> str:
    """A folder per transfer for its server's files, so that two controllers do not stop each other's."""
    return os.path.join(folder, SHARE, hashlib.sha256(secret.encode()).hexdigest()[:16])


def places(folder: str) -> list[str]:
    """Those of all transfers, including ones that were never stopped."""
    share = os.path.join(folder, SHARE)
    return [os.path.join(share, name) for name in sorted(os.listdir(share))] if os.path.isdir(share) else []


def running(place: str) -> ServerState | None:
    """The state of a server if its process is alive."""
    state = _state(place)
    found = processes.process(number(state, "pid"))
    is_ours = found and found.start == state.get("pid_start") and os.path.join(place, "server.py") in found.argv
    return state if is_ours and not state.get("ended") else None


def start(settings: ServerSettings) -> ServerState:
    """Start the server in a separate session; returns its state once it listens."""
    _forget_those_that_ended(settings.folder)
    place = place_of(settings.folder, settings.secret)
    # makedirs applies the mode only to the last folder.
    os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
    os.makedirs(place, mode=0o700, exist_ok=True)
    for name in ("server.state", "server.log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(place, name))
    program, config = os.path.join(place, "server.py"), os.path.join(place, "server.json")
    write_whole(program, host_code.program(server.__name__, "main"), 0o600)
    write_json(config, {**settings._asdict(), "state": os.path.join(place, "server.state")}, 0o600)
    with open(os.path.join(place, "server.log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", program, config],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
        )
    return _wait_until_listening(settings, process)


def _wait_until_listening(settings: ServerSettings, process: subprocess.Popen[bytes]) -> ServerState:
    deadline = time.monotonic() + START_SECONDS
    place = place_of(settings.folder, settings.secret)
    while time.monotonic() < deadline:
        state = _state(place)
        if state.get("error"):
            process.wait()
            raise ShardsError(
                f"{settings.host}: the shard server cannot listen on {state['error']}; the address must be one of this "
                "host's own and the range must hold a free port"
            )
        if state.get("port"):
            return state
        if process.poll() is not None:
            break
        time.sleep(0.02)
    with open(os.path.join(place, "server.log"), encoding="utf-8", errors="replace") as log:
        said = log.read().strip().splitlines()[-1:] or ["nothing"]
    raise ShardsError(f"{settings.host}: the shard server of {settings.folder} did not start; it said: {said[0]}")


def _forget_those_that_ended(folder: str) -> None:
    """Remove remains of servers that exited by themselves."""
    for place in places(folder):
        if _state(place) and running(place) is None:
            remove_tree(place)


def stop(place: str) -> ServerState | None:
    """Stop exactly this server; returns its last state, None if none was running."""
    state = running(place)
    if state is not None:
        pid, started = state["pid"], state["pid_start"]
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if processes.alive(pid, started):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
            deadline = time.monotonic() + STOP_SECONDS
            while processes.alive(pid, started) and time.monotonic() < deadline:
                time.sleep(0.02)
        state = _state(place) or state
    remove_tree(place)
    with contextlib.suppress(OSError):  # another transfer goes on
        os.rmdir(os.path.dirname(place))
    return state


def is_same(settings: ServerSettings) -> bool:
    """Whether the running server has the same config and can be reused."""
    config = read_object(os.path.join(place_of(settings.folder, settings.secret), "server.json"))
    config.pop("state", None)
    return bool(config == settings._asdict())


def _state(place: str) -> ServerState:
    return cast(ServerState, read_object(os.path.join(place, "server.state")))
