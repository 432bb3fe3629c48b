# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role tracker starts a real MLflow server; what the trainer tells it is read back through its API."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, free_port
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, counts, messages, results

CACHE = Path(os.environ.get("NANOCHAT_DDP_HOME") or Path.home() / ".cache" / "nanochat-ddp")
VERSION = (ROOT / "trainer/locks/mlflow-server.txt").read_text().split("\nmlflow==")[1].split()[0]
STEPS = 25
LOG_A_RUN = """
import sys
from pathlib import Path
from nanochat.record.tracker import open_tracker
uri, folder = sys.argv[1], Path(sys.argv[2])
tracker = open_tracker("mlflow", uri, "d4", {"depth": 4, "matrix_lr": 0.02}, folder)
for step in range(%d):
    tracker.take({"kind": "step", "time": 1.7e9 + step, "step": step, "loss": 10 - step / 10})
tracker.close("finished")
""" % STEPS  # fmt: skip

pytestmark = [pytest.mark.long, pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")]


@pytest.fixture(scope="module")
def trainer_python() -> Path:
    """A Python with torch, as ./test.sh makes it."""
    for folder in (os.environ.get("TRAINER_VENV"), CACHE / "tests-venv", CACHE / "trainer"):
        if folder and (Path(folder) / "bin" / "python").exists():
            return Path(folder) / "bin" / "python"
    pytest.skip("there is no Python with torch: ./test.sh trainer makes one")


def output(*argv: Any, **more: Any) -> str:
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=900, check=False, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def mlflow_venv(trainer_python: Path) -> Path:
    """MLflow in a Python of the trainer's version, installed once and kept."""
    minor = output(trainer_python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    venv = CACHE / f"mlflow-{VERSION}-py{minor}"
    if not (venv / "installed").exists():
        shutil.rmtree(venv, ignore_errors=True)
        output(trainer_python, "-m", "venv", venv)
        output(venv / "bin" / "python", "-m", "pip", "install", "-q", f"mlflow=={VERSION}")
        (venv / "installed").touch()
    return venv


class Server:
    """The tracker of one test job."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self.port}"
        training = {"tracker": "mlflow", "tracker_port": self.port}
        plan = {
            "run": "d4",
            "data": {"id": "x"},
            "timeout_seconds": 60,
            "master": {"host": "node1"},
            "training": training,
        }
        self._play = Play(folder, ("node1", "node2"), plan, {"TMUX_TMPDIR": str(folder)})
        self._play.variables = {"ddp_controller": {"results_dir": str(folder / "results")}}
        (folder / "node1/tracker").mkdir(parents=True)
        (folder / "node1/tracker/venv").symlink_to(venv)

    def play(self, role: str = "tracker", *words: str) -> dict[str, Any]:
        account = self._play.run(role, *words)
        assert not any(counts(account, "failures").values()), messages(account)
        return account

    def ask(self, path: str, body: dict[str, Any] | None = None, host: str | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json", **({"Host": host} if host else {})}
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/{path}", data=data, headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return dict(json.load(answer))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_venv: Path) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("tracker"), mlflow_venv)
    try:
        told = results(server.play(), "Start the server")
        assert told["node1"]["show"] == f"MLflow: {server.url} on node1" and told["node2"]["skipped"]
        yield server
    finally:
        with contextlib.suppress(AssertionError):
            server.play("tracker:reset")


def test_the_master_alone_has_a_server_which_no_other_machine_and_no_page_can_ask(server: Server) -> None:
    assert (server.folder / "node1" / "tracker" / "mlflow.db").exists() and not (server.folder / "node2").exists()
    listening = output("ss", "-Hltn", f"sport = :{server.port}")
    assert [line.split()[3] for line in listening.splitlines()] == [f"127.0.0.1:{server.port}"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask("experiments/search", {"max_results": 1}, host="evil.example")
    assert refused.value.code == 403
    assert counts(server.play(), "changed") == {"node1": 0, "node2": 0}


def test_what_the_trainer_logs_is_read_back(
    server: Server, mlflow_venv: Path, trainer_python: Path, tmp_path: Path
) -> None:
    site = output(trainer_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    path = os.pathsep.join([str(ROOT / "trainer"), site])
    environment = {**os.environ, "PYTHONPATH": path, "MLFLOW_EXPERIMENT_NAME": "nanochat-d4", "NO_PROXY": "127.0.0.1"}
    output(mlflow_venv / "bin" / "python", "-c", LOG_A_RUN, server.url, tmp_path, env=environment)
    experiment = server.ask("experiments/get-by-name?experiment_name=nanochat-d4")["experiment"]
    runs = server.ask("runs/search", {"experiment_ids": [experiment["experiment_id"]]})["runs"]
    assert len(runs) == 1
    info, data = runs[0]["info"], runs[0]["data"]
    assert (info["run_name"], info["status"]) == ("d4", "FINISHED")
    assert {param["key"]: param["value"] for param in data["params"]} == {"depth": "4", "matrix_lr": "0.02"}
    history = server.ask(f"metrics/get-history?run_id={info['run_id']}&metric_key=train/loss")["metrics"]
    assert [(point["step"], point["value"]) for point in sorted(history, key=lambda one: one["step"])] == [
        (step, 10 - step / 10) for step in range(STEPS)
    ]


def test_the_report_is_logged_with_the_run(server: Server) -> None:
    created = server.ask("experiments/create", {"name": "with-report"})
    info = server.ask("runs/create", {"experiment_id": created["experiment_id"], "run_name": "d4"})["run"]["info"]
    run_dir = server.folder / "node1" / "runs" / "d4"
    fake_run.write_history(run_dir, fake_run.history(0, 1, 10, 1.7e9), 0)
    fake_run.write_json(run_dir / "tracker.json", {"tracker": "mlflow", "id": info["run_id"]})
    server.play("collect")
    (logged,) = server.ask(f"artifacts/list?run_id={info['run_id']}")["files"]
    report = server.folder / "results" / "d4" / "report.html"
    assert (logged["path"], logged["file_size"]) == ("report.html", report.stat().st_size)
    assert counts(server.play("collect"), "changed") == {"node1": 0, "node2": 0}


def test_stopping_ends_it_and_keeps_what_it_knows(server: Server) -> None:
    server.play("tracker:reset")
    with pytest.raises(urllib.error.URLError):
        server.ask("experiments/search", {"max_results": 1})
    assert (server.folder / "node1" / "tracker" / "mlflow.db").exists()
    again = server.play("tracker:reset")
    assert counts(again, "changed") == {"node1": 0, "node2": 0}
