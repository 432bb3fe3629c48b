# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts, finds and stops the short-lived server which hands a folder's files to the peers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object, write_json, write_whole
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    ShardsError,
    remove_tree,
)

SHARE = ".share"
START_SECONDS = 15


class Offer(NamedTuple):
    """What a server is started with."""

    host: str
    folder: str
    address: str
    low: int
    high: int
    allow: list[str]
    secret: str
    lifetime: int
    idle: int


def running(folder: str) -> dict[str, Any] | None:
    """The state of the folder's server if that very process is alive."""
    state = _state(folder)
    pid = int(state.get("pid") or 0)
    if not pid or state.get("ended") or not _is_ours(pid, state, folder):
        return None
    return state


def _is_ours(pid: int, state: dict[str, Any], folder: str) -> bool:
    found = processes.process(pid)
    return bool(
        found
        and found.start == state.get("pid_start")
        and found.state != "Z"
        and _path(folder, "server.py") in found.argv
    )


def start(offer: Offer) -> dict[str, Any]:
    """Starts the server in a session of its own and returns its state once it listens."""
    share = os.path.join(offer.folder, SHARE)
    os.makedirs(share, mode=0o700, exist_ok=True)
    for name in ("server.state", "server.log"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(share, name))
    write_whole(_path(offer.folder, "server.py"), host_code.program(server.__name__, "main"), 0o600)
    settings = {**offer._asdict(), "state": _path(offer.folder, "server.state")}
    write_json(_path(offer.folder, "server.json"), settings, 0o600)
    with open(_path(offer.folder, "server.log"), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", _path(offer.folder, "server.py"), _path(offer.folder, "server.json")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            cwd="/",
        )
    return _wait_until_listening(offer, process)


def _wait_until_listening(offer: Offer, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        state = _state(offer.folder)
        if state.get("error"):
            process.wait()
            raise ShardsError(
                f"{offer.host}: the shard server cannot listen on {state['error']}; the address must be one of this "
                "host's own and the range must hold a free port"
            )
        if state.get("port"):
            return state
        if process.poll() is not None:
            break
        time.sleep(0.02)
    with open(_path(offer.folder, "server.log"), encoding="utf-8", errors="replace") as log:
        said = log.read().strip().splitlines()[-1:] or ["nothing"]
    raise ShardsError(f"{offer.host}: the shard server of {offer.folder} did not start; it said: {said[0]}")


def stop(folder: str, patience: float = 10.0) -> dict[str, Any] | None:
    """Ends the folder's server, and only that; returns its last state, None if none was running."""
    state = running(folder)
    if state is not None:
        pid = int(state["pid"])
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
            if _wait_gone(folder, state, patience):
                break
        state = _state(folder) or state
    remove_tree(os.path.join(folder, SHARE))
    return state


def _wait_gone(folder: str, state: dict[str, Any], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(int(state["pid"]), os.WNOHANG)
        if not _is_ours(int(state["pid"]), state, folder):
            return True
        time.sleep(0.02)
    return False


def is_same(folder: str, offer: Offer) -> bool:
    """Whether the running server was started with just these settings, so that it may go on."""
    settings = read_object(_path(folder, "server.json"))
    settings.pop("state", None)
    return bool(settings == offer._asdict())


def _state(folder: str) -> dict[str, Any]:
    return read_object(_path(folder, "server.state"))


def _path(folder: str, name: str) -> str:
    return os.path.join(folder, SHARE, name)
