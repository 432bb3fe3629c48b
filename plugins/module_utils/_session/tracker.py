# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The MLflow server of a host: one session, whose database, artifacts and log belong to the host, not to one run."""

from __future__ import annotations

import http.client
import os
import time
import urllib.request
from typing import Any, Dict, Sequence

from .._kit.env_file import env_file
from .._kit.files import read_text
from .session import SessionError, tmux_session

NAME = "nanochat-tracker"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
START_SECONDS = 120.0  # the first start creates the database


def start_tracker(
    path: str, venv_dir: str, port: int, names: Sequence[str], host: str = "", check: bool = False
) -> Dict[str, Any]:
    """Start the server in a folder unless it runs, and wait until it answers; names: by which browsers may call this host."""
    if not check:
        os.makedirs(path, mode=0o700, exist_ok=True)
    env, log = os.path.join(path, "env"), os.path.join(path, "log", "server.log")
    written = env_file(check, path=env, env=QUIET)
    # Against pages that try to reach it behind their readers' backs.
    allowed = [*names, *(f"{name}:{port}" for name in names)]
    argv = [
        *(os.path.join(venv_dir, "bin", "python"), "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"),
        *(
            "--workers=1",
            f"--backend-store-uri=sqlite:///{path}/mlflow.db",
            f"--artifacts-destination={path}/artifacts",
        ),
        f"--allowed-hosts={','.join(allowed)}",
    ]
    session = {"name": NAME, "state_dir": path, "env_file": env, "log": log, "argv": argv, "rerun": True}
    started = tmux_session(check, **session)
    if not check and not _answers(port):
        raise SessionError(
            f"The MLflow server on {host} does not answer at port {port} after two minutes. Another program may hold the port "
            f"(ddp_tracker_port); its log {log} ends with: {' / '.join(read_text(log).splitlines()[-3:])}"
        )
    return {**started, "changed": written["changed"] or started["changed"]}


def _answers(port: int) -> bool:
    """Whether the server does, in the time in which it starts."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            with direct.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return bool(answer.status == http.client.OK)
        except (OSError, http.client.HTTPException):
            time.sleep(0.5)
    return False
