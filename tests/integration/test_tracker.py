# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tracker's session, with a small server in place of MLflow; test_tracker_mlflow.py plays the role with the real one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._session import tracker
from ansible_collections.nanochat.ddp.plugins.module_utils._session.session import tmux_session
from ansible_collections.nanochat.ddp.tests.integration.local import free_port, until

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
SERVER = """#!{python}
import http.server, os, sys
port = next(int(word[7:]) for word in sys.argv if word.startswith("--port="))
if not os.path.exists({folder!r} + "/healthy"):
    sys.exit("no database\\nport taken")
open({folder!r} + "/health", "w").close()
os.chdir({folder!r})
http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_it_is_started_once_and_why_it_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setattr(tracker, "START_SECONDS", 15.0)
    python, folder, port = tmp_path / "venv/bin/python", tmp_path / "tracker", free_port()
    python.parent.mkdir(parents=True)
    python.write_text(SERVER.format(python=sys.executable, folder=str(tmp_path)))
    python.chmod(0o755)

    def start(check: bool = False) -> dict[str, object]:
        return tracker.start_tracker(str(folder), str(tmp_path / "venv"), port, ["desktop"], "desktop", check)

    assert start(check=True)["changed"] and not folder.exists()
    session = {"name": tracker.NAME, "state_dir": str(folder)}
    try:
        with monkeypatch.context() as patch, pytest.raises(tracker.SessionError) as refused:
            patch.setattr(tracker, "START_SECONDS", 0.0)
            start()
        told = str(refused.value)
        assert f"on desktop does not answer at port {port}" in told and "(ddp_tracker_port)" in told
        until(lambda: tmux_session(check=True, **session, state="stopped")["session"]["state"] == "finished")
        (tmp_path / "healthy").touch()
        assert start()["changed"] and not start()["changed"]
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        tmux_session(**session, state="absent", stop_timeout=1)
