# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run folder whose files are torn, empty, of another type or huge: every reader ends in an answer or in a sentence."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.filter.run_tables import closing_table, seen_of
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.decode import decode
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import reading
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.leftovers import data_sets, run_facts
from ansible_collections.nanochat.ddp.plugins.module_utils._run import (
    collected,
    files,
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
from ansible_collections.nanochat.ddp.plugins.module_utils._session.session import Session, Spec
from ansible_collections.nanochat.ddp.plugins.module_utils._session.tmux import Tmux
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server as shard_server
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import Digests
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGE = str(Path(__file__).resolve().parents[5] / "roles" / "collect" / "files")
# Of one sort each; NANOCHAT_DDP_CASES=1000 tries more.
EXAMPLES = int(os.environ.get("NANOCHAT_DDP_CASES", "40"))
NAMES = (
    *("plan.json", "session.json", "heartbeat-rank0.json", "metrics-rank0.jsonl"),
    *("log/rank0.log", ".session/launch.json", "manifest.json", ".digests.json", "dump-rank0.json", "server.state"),
)
ODD = st.floats() | st.sampled_from(
    [
        *(None, True, 0, -1, 1.5, 2**70, -(2**70), 10**300, "", "x", "\ud800", "a\0b", "é"),
        *([], {}, [[]], [1], ["x"], [None], [{}], {"a": 1}, {"": None}),
    ]
)  # fmt: skip
WORDS = """
kind time step loss seconds id session pid pid_start boot_id ended exit_code signal started log_begin nodes model data training trainer
digest rank world host run_dir rows argv env env_secret steps settings parameters total reason error resumed_from identical phase
phase_since collective master shards names bytes path checkpoint_bytes iterations timeout_seconds seen code format tokens_per_second
"""
KEYS = st.sampled_from(WORDS.split())
KINDS = st.sampled_from(["start", "step", "eval", "sample", "digest", "checkpoint", "end", "x"])
THING = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
EVENT = st.dictionaries(KEYS, THING, max_size=8).flatmap(lambda event: KINDS.map(lambda kind: {**event, "kind": kind}))
BYTES = st.sampled_from(
    [
        b"", b"{", b"[" * 1000, b"[" * 100000, b'{"a":' * 1000, b"null", b"\xff\xfe\0", b"\0" * 5000, b"9" * 5000,
        b'"\\ud800"',
        *(b'{"kind": "step", "step": NaN}\n', b"x" * 300_000, b"\n" * 2000, b'{"nodes": [' + b"{}," * 3000 + b"{}]}"),
    ]
)  # fmt: skip


def as_bytes(thing: Any) -> bytes:
    return json.dumps(thing).encode()


def places(thing: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a document."""
    inner = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    return [so_far, *(found for key, value in inner for found in places(value, (*so_far, key)))]


def replaced(thing: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    changed = copy.copy(thing)
    changed[place[0]] = replaced(thing[place[0]], place[1:], value)
    return changed


def wrong_somewhere(document: Any) -> st.SearchStrategy[Any]:
    """A good document with one value that is none."""
    return st.tuples(st.sampled_from(places(document)), ODD).map(lambda change: replaced(document, *change))


def lines(events: Any) -> bytes:
    return b"".join(as_bytes(one) + b"\n" for one in (events if isinstance(events, list) else [events]))


GOOD_PLAN = {**fake_run.plan_for([Path("/x/runs/d4")], 12), "trainer": {"source": "ours"}}
GOOD_PLAN["nodes"][0].update(argv=["python", "--resume"], env={"A": "b"}, env_secret=["A"], checkpoint_bytes=5)
GOOD_SESSION = fake_run.session_of(0, 5.0, ended=6.0, exit_code=0, log_begin=0, stopped=False)
GOOD_BEAT = {
    "time": time.time(),
    "pid": 1,
    "rank": 0,
    "world": 2,
    "step": 3,
    "steps": 9,
    "phase": "sync",
    "phase_since": 5.0,
    "collective": "x",
    "step_seconds": 1.0,
    "save_seconds": 2.0,
    "oom_kills": 0,
}
GOOD_LAUNCH = {
    "id": "a1", "session": "job", "boot_id": processes.boot_id(), "stop_timeout": 5.0,
    "given": {"argv": ["true"], "chdir": "/", "env_file": None, "log": "/tmp/log", "env": {"A": "0f"}},
}  # fmt: skip
GOOD_DIGESTS = {"files": {"a": {"bytes": 1, "mtime_ns": 2, "inode": 3, "sha256": "0f"}}}
GOOD_DUMP = {"stacks": {"MainThread": ["a.py:1 in f"]}, "flight": {"last_seq": 7}}
GOOD_STATE = {"pid": 1, "pid_start": 2, "address": "::1", "port": 5}
SPOILT_OF = {
    ".session/launch.json": wrong_somewhere(GOOD_LAUNCH).map(as_bytes),
    ".digests.json": wrong_somewhere(GOOD_DIGESTS).map(as_bytes),
    "dump-rank0.json": wrong_somewhere(GOOD_DUMP).map(as_bytes),
    "server.state": wrong_somewhere(GOOD_STATE).map(as_bytes),
    "plan.json": wrong_somewhere(GOOD_PLAN).map(as_bytes),
    "session.json": wrong_somewhere(GOOD_SESSION).map(as_bytes),
    "heartbeat-rank0.json": wrong_somewhere(GOOD_BEAT).map(as_bytes),
    "metrics-rank0.jsonl": wrong_somewhere(fake_run.history(0, 2, 12, 5.0)).map(lines),
}
SPOILT = (
    BYTES
    | THING.map(as_bytes)
    | st.lists(EVENT | THING, max_size=6).map(lambda events: b"\n".join(map(as_bytes, events)) + b"\n")
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, collected as well, which each case starts from."""
    base = tmp_path_factory.mktemp("spoilt")
    run = base / "runs" / "d4"
    begun = time.time() - 100
    fake_run.write_history(run, fake_run.history(0, 2, 12, begun), 0)
    fake_run.write_json(run / "session.json", fake_run.session_of(0, begun, ended=begun + 50, exit_code=0))
    fake_run.write_json(run / "plan.json", signed(fake_run.plan_for([run], 12)))
    return base


def look_everywhere(base: Path) -> None:
    """Every reader of the collection's side of a run folder."""
    run = str(base / "runs" / "d4")
    seen = state.read_run(run)
    # Whatever lies in its files, an honest host is believed: it must be possible to stop it.
    decode(state.RunState, json.loads(json.dumps(seen)))
    state.read_run(run, lines=0, limit=metrics.PEEK_BYTES)
    find.newest_run(str(base))
    files.missing_files(run, {}, True, 10**6)
    files.known_copies(run)
    run_facts(run)
    data_sets(str(base))
    purge.plan_purge(str(base), "", True)
    deployed = polling.run_info(run_dir=run, lines=0, plan=True)["plan"]
    assert deployed == {} or (deployed["world"], len(deployed["nodes"])) == (1, 1)
    session = Session("job", run, Tmux())
    session.left_over()
    for wanted in (None, Spec(("true",), "/", None, "/tmp/log")):
        session.describe(wanted, session.status()["state"])
    session.same(Spec(("true",), "/", None, "/tmp/log"))
    boot.was_cut_short(run)
    Digests(run).known("a")
    shard_server.running(f"{run}/server.state")
    found: Any = {"run": seen, "dump": read_object(f"{run}/dump-rank0.json")}
    reading.innermost_frame(found)
    reading.last_collective(found)
    rows = seen_of({"node1": {"run": seen}, "node2": {"unreachable": True}})
    closing_table({"node1": {"run": seen}})
    json.dumps(table.status_data(rows))
    table.status_screen(rows)
    table.closing_table(rows, 60)
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


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.sampled_from(NAMES).flatmap(lambda name: st.fixed_dictionaries({name: SPOILT_OF.get(name, SPOILT) | SPOILT})))
def test_spoilt_files_are_read_without_a_traceback(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, spoilt: dict[str, bytes]
) -> None:
    base = tmp_path_factory.mktemp("case")
    try:
        shutil.copytree(whole, base, dirs_exist_ok=True)
        for name, content in spoilt.items():
            path = base / "runs" / "d4" / name if name != "manifest.json" else base / "data" / "text-00000000" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        look_everywhere(base)
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_in_the_place_of_a_file_is_no_file(whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs" / "d4" / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    look_everywhere(tmp_path)
