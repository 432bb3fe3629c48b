# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run folder whose files are torn, empty, of another type or huge: every reader ends in an answer or in a sentence."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import decode
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import evidence, gather
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.leftovers import data_sets, run_facts
from ansible_collections.nanochat.ddp.plugins.module_utils._run import (
    collected,
    find,
    folder,
    metrics,
    polling,
    purge,
    report,
    state,
    table,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot
from ansible_collections.nanochat.ddp.plugins.module_utils._session.session import Session, decide
from ansible_collections.nanochat.ddp.plugins.module_utils._session.tmux import Tmux
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server as shard_server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.watch import closing_table
from ansible_collections.nanochat.ddp.plugins.plugin_utils._runs import seen_of
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.unit.plugins.test_hostile_answers import cases

PAGE = str(Path(__file__).resolve().parents[5] / "roles" / "collect" / "files")
NAMES = (
    *("plan.json", "session.json", "heartbeat-rank0.json", "metrics-rank0.jsonl"),
    *("log/rank0.log", ".session/launch.json", "manifest.json", ".digests.json", "dump-rank0.json", "server.state"),
)
BYTES = [
    b"", b"{", b"[" * 1000, b"[" * 100000, b'{"a":' * 1000, b"null", b"\xff\xfe\0", b"\0" * 5000, b"9" * 5000,
    b'"\\ud800"', b'{"kind": "step", "step": NaN}\n', b"x" * 300_000, b"\n" * 2000, b'{"nodes": [' + b"{}," * 3000 + b"{}]}",
]  # fmt: skip


GOOD_PLAN = fake_run.plan_for([Path("/x/runs/d4")], 12)
GOOD_PLAN["nodes"][0].update(argv=["python", "--resume"], env={"A": "b"}, env_secret=["A"], checkpoint_bytes=5)
BEAT = {
    "time": time.time(),
    "pid": 1,
    "rank": 0,
    "world": 2,
    "step": 3,
    "steps": 9,
    "phase": "sync",
    "phase_since": 5.0,
}
GIVEN = {"argv": ["true"], "chdir": "/", "env_file": None, "log": "/tmp/log", "env": {"A": "0f"}}
LAUNCH = {
    "id": "a1",
    "session": "job",
    "boot_id": processes.boot_id(),
    "stop_timeout": 5.0,
}
GOOD: dict[str, list[Any]] = {
    "plan.json": [GOOD_PLAN],
    "session.json": [fake_run.session_of(0, 5.0, ended=6.0, exit_code=0, log_begin=0, stopped=False)],
    "heartbeat-rank0.json": [{**BEAT, "collective": "x", "step_seconds": 1.0, "save_seconds": 2.0, "oom_kills": 0}],
    "metrics-rank0.jsonl": fake_run.history(0, 2, 12, 5.0),
    ".session/launch.json": [{**LAUNCH, "given": GIVEN}],
    ".digests.json": [{"files": {"a": {"bytes": 1, "mtime_ns": 2, "inode": 3, "sha256": "0f"}}}],
    "dump-rank0.json": [{"stacks": {"MainThread": ["a.py:1 in f"]}, "flight": {"last_seq": 7}}],
    "server.state": [{"pid": 1, "pid_start": 2, "address": "::1", "port": 5}],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, collected as well, which each case starts from."""
    base = tmp_path_factory.mktemp("spoilt")
    run = base / "runs" / "d4"
    begun = time.time() - 100
    fake_run.write_history(run, fake_run.history(0, 2, 12, begun), 0)
    fake_run.write_json(run / "session.json", fake_run.session_of(0, begun, ended=begun + 50, exit_code=0))
    fake_run.write_json(run / "plan.json", fake_run.plan_for([run], 12))
    return base


def look_everywhere(base: Path) -> None:
    """Every reader of the collection's side of a run folder."""
    run = str(base / "runs" / "d4")
    seen = state.read_run(run)
    # Whatever lies in its files, an honest host is believed: it must be possible to stop it.
    decode(state.RunState, json.loads(json.dumps(seen)))
    state.read_run(run, lines=0, limit=metrics.PEEK_BYTES)
    find.newest_run(str(base))
    find.run_files(run_dir=run, checkpoints=True)
    run_facts(run)
    data_sets(str(base))
    with contextlib.suppress(purge.PurgeError):
        purge.plan_purge(str(base), "", True)
    deployed = polling.run_info(run_dir=run, lines=0, plan=True)["plan"]
    assert deployed == {} or (deployed["world"], len(deployed["nodes"])) == (1, 1)
    session = Session("job", run, Tmux())
    decide(session, "stopped", False, None)
    job: Any = {"argv": ["true"], "chdir": "/", "env_file": None, "log": "/tmp/log"}
    for wanted in (None, job):
        session.describe(wanted, session.status()["state"])
    session.same(job)
    boot.was_cut_short(run)
    Digests(run).known("a")
    shard_server.running(f"{run}/server.state")
    found: Any = {"run": seen, "stacks": gather.answer(run, 0, None)}
    evidence.innermost_frame(found)
    rows = seen_of({"node1": {"run": seen}, "node2": {"unreachable": True}})
    closing_table({"node1": {"run": seen}})
    json.dumps(table.status_data(rows))
    table.status_screen(rows, 60)
    for dry in (True, False):
        try:
            folder.prepare(run, fake_run.plan_for([base / "runs" / "d4"], 12), False, dry)
        except folder.RunFolderError as error:
            assert "ddp_fresh" in str(error) or "Is a directory" in str(error)
    try:
        report.make_report([str(base / "runs")], PAGE)
    except collected.ReportError as error:
        assert "collect" in str(error)


def test_a_good_run_is_read(whole: Path) -> None:
    look_everywhere(whole)


@pytest.mark.parametrize("name", NAMES)
def test_spoilt_files_are_read_without_a_traceback(whole: Path, tmp_path: Path, name: str) -> None:
    spoilt = [b"".join(json.dumps(line).encode() + b"\n" for line in one) for one in cases(GOOD.get(name, []))]
    for number, content in enumerate([*(spoilt[::30] if name in GOOD else []), *BYTES[::2]]):
        base = tmp_path / str(number)
        shutil.copytree(whole, base)
        path = base / "runs" / "d4" / name if name != "manifest.json" else base / "data" / "text-00000000" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        look_everywhere(base)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_in_the_place_of_a_file_is_no_file(whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs" / "d4" / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    look_everywhere(tmp_path)
