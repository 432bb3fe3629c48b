# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts, finds and stops the short-lived server of a folder's files, as the module shard_server asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple, TypedDict, cast

from .._contract.document import number
from .._kit import host_code, processes
from .._kit.files import read_object, read_text, write_json, write_whole
from . import server
from .folder import Digests, ShardsError, compare, entries, load_manifest, make_folder, writing
from .module import ShardsOutcome, ShardsRequest

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

    @property
    def place(self) -> str:
        return place_of(self.folder, self.secret)


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
    place = settings.place
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
    while time.monotonic() < deadline:
        state = _state(settings.place)
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
    said = read_text(os.path.join(settings.place, "server.log")).strip().splitlines()[-1:] or ["nothing"]
    raise ShardsError(f"{settings.host}: the shard server of {settings.folder} did not start; it said: {said[0]}")


def _forget_those_that_ended(folder: str) -> None:
    """Remove remains of servers that exited by themselves."""
    for place in places(folder):
        if _state(place) and running(place) is None:
            _remove_tree(place)


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
    _remove_tree(place)
    with contextlib.suppress(OSError):  # another transfer goes on
        os.rmdir(os.path.dirname(place))
    return state


def _is_same(settings: ServerSettings) -> bool:
    """Whether the running server has the same config and can be reused."""
    config = read_object(os.path.join(settings.place, "server.json"))
    config.pop("state", None)
    return bool(config == settings._asdict())


def _state(place: str) -> ServerState:
    return cast(ServerState, read_object(os.path.join(place, "server.state")))


def _remove_tree(path: str) -> None:
    """Remove a folder or file of any kind; it may be missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# ---------------------------------------------------------------------------------------------------------------------
# The states of the module shard_server.


def serve_or_stop(request: ShardsRequest) -> ShardsOutcome:
    """Start or stop the server, according to the option state."""
    return _stop_all(request) if request.options["state"] == "stopped" else _serve(request)


def _serve(request: ShardsRequest) -> ShardsOutcome:
    """Serve the folder's verified files."""
    outcome = ShardsOutcome()
    options = request.options
    ports = options["ports"] or {"low": 0, "high": 0}
    settings = ServerSettings(
        request.host,
        request.path,
        options["address"],
        ports["low"],
        ports["high"],
        sorted(options["allow"]),
        options["secret"],
        options["lifetime"],
        options["idle"],
    )
    place = settings.place
    state = running(place)
    same = state is not None and _is_same(settings)
    outcome.changed = not same
    outcome.before = _server_line(state)
    outcome.after = _server_line(state) if same else f"serving {request.path} on {settings.address}\n"
    if not same and not request.check:
        make_folder(request.path, request.host)
        stop(place)
        _know_digests(request)
        state = start(settings)
    outcome.more = _server(settings.host, settings.address, state if not request.check or same else None)
    return outcome


def _know_digests(request: ShardsRequest) -> None:
    """Hash changed files, so that the server offers everything valid from the start."""
    wanted = entries(request.manifest or load_manifest(request.path) or {})
    with writing(request.path, request.host):
        digests = Digests(request.path, use_stored=not request.full)
        compare(wanted, digests)
        digests.save()


def _server(host: str, address: str | None, state: ServerState | None) -> dict[str, object]:
    """The server as its peers see it, with its process and what it has sent."""
    state = state or {}
    return {
        "server": {"host": host, "address": state.get("address") or address, "port": state.get("port")},
        "pid": state.get("pid"),
        "served": dict(state.get("served") or {}),
    }


def _server_line(state: ServerState | None) -> str:
    return f"serving on {state['address']}:{state['port']}, pid {state['pid']}\n" if state else ""


def _stop_all(request: ShardsRequest) -> ShardsOutcome:
    """Stop the transfer's server and delete its secret; without a secret, those of all transfers."""
    outcome = ShardsOutcome()
    secret = request.options["secret"]
    state = None
    for place in [place_of(request.path, secret)] if secret else places(request.path):
        found = running(place)
        outcome.changed = outcome.changed or found is not None
        outcome.before += _server_line(found)
        state = found or state
        if not request.check:
            state = stop(place) or state
    outcome.more = _server(request.host, None, state)
    return outcome
