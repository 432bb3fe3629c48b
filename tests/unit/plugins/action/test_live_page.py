# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The live page while a run is watched: one process at a time writes it, not too often, and whole."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.nanochat.ddp.plugins.action import run_watch
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RunNameError
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _live_page
from ansible_collections.nanochat.ddp.plugins.plugin_utils._company import Ledger
from ansible_collections.nanochat.ddp.tests.integration import fake_run

ROWS = [{"host": "node1", "run": {**EMPTY, "state": "running", "run": "d4", "rank": 0}, "reachable": True}]


@pytest.fixture
def folder(tmp_path):
    node = tmp_path / "runs" / "d4" / "node1"
    fake_run.write_history(node, fake_run.history(0, 1, 40, 1.7e9), 0)
    fake_run.write_json(node / "plan.json", fake_run.plan_for([node], 40))
    return node.parent


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=1000.0)
    monkeypatch.setattr(_live_page.time, "time", lambda: now.at)
    return now


def test_it_is_renewed_every_few_seconds_and_once_more_at_the_end(folder, tmp_path, clock):
    ledger, page = Ledger(tmp_path / "ledger"), folder / "live.html"
    assert _live_page.renew(ROWS, folder, ledger)
    first = page.read_text()
    clock.at += 1
    assert not _live_page.renew(ROWS, folder, ledger)
    assert page.read_text() == first
    clock.at += 3
    assert _live_page.renew(ROWS, folder, ledger)
    assert page.read_text() != first
    assert _live_page.renew(ROWS, folder, ledger, last=True)
    assert sorted(path.name for path in folder.iterdir()) == ["live.html", "node1"]


def test_a_page_that_takes_long_is_renewed_less_often(folder, tmp_path, clock):
    ledger = Ledger(tmp_path / "ledger")
    ledger.write("page", {"at": clock.at - 9, "took": 1.0})
    assert not _live_page.renew(ROWS, folder, ledger)
    clock.at += 2
    assert _live_page.renew(ROWS, folder, ledger)


def test_one_process_at_a_time_writes_it(folder, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    with ledger.claim("page", wait=True):
        assert not _live_page.renew(ROWS, folder, Ledger(tmp_path / "ledger"))
    assert not (folder / "live.html").exists()


def test_before_anything_was_brought_there_is_no_page(tmp_path):
    assert _live_page.renew(ROWS, tmp_path / "runs" / "d4", Ledger(tmp_path / "ledger"))
    assert not (tmp_path / "runs").exists()


def test_a_run_name_that_leads_elsewhere_is_refused(tmp_path):
    assert _live_page.run_folder(str(tmp_path), "/home/me/nanochat-ddp/runs/d4") == tmp_path / "d4"
    with pytest.raises(RunNameError):
        _live_page.run_folder(str(tmp_path), "/home/me/runs/..")


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A watch of one host whose looks tell that the run is at step 3; what is brought is noted."""
    monkeypatch.setattr(run_watch, "ledger_of", lambda action, name: Ledger(tmp_path / name))
    node = {"host": "node1", "run_dir": "/home/me/runs/d4", "rank": 0}
    options: dict[str, Any] = {"nodes": [node], "live_page": str(tmp_path), "first_step": False}
    made: Any = object.__new__(run_watch.ActionModule)
    made.asked, made.brought = [], []
    monkeypatch.setattr(run_watch.ActionModule, "_options", lambda self: options, raising=False)
    monkeypatch.setattr(
        made,
        "ask",
        lambda asked, variables: made.asked.append(asked) or {"run": {"state": "running", "step": 3}},
        raising=False,
    )
    monkeypatch.setattr(run_watch._live_page, "bring", lambda *asked: made.brought.append(asked[1:4]))
    return made, options


def test_while_there_is_a_page_looks_come_often_and_bring_the_metrics(watch, tmp_path):
    made, options = watch
    entry: Any = {"begun": 0.0, "run": {"state": "running", "step": 2}}
    assert made._poll("node1", options, entry, {}) is None
    assert made.brought == [("/home/me/runs/d4", tmp_path / "d4", "node1")]
    assert made.asked[0]["wait"]["at_least"] == _live_page.LOOK_SECONDS
    assert entry["run"]["step"] == 3
    made._poll("node1", {**options, "live_page": ""}, entry, {})
    assert len(made.brought) == 1
    assert made.asked[1]["wait"]["at_least"] == 20.0


def test_a_host_that_freezes_while_its_metrics_are_brought_gives_no_answer(watch, monkeypatch):
    def freeze(*asked: Any) -> None:
        raise AnsibleConnectionFailure("no answer within 25 s")

    made, options = watch
    monkeypatch.setattr(run_watch._live_page, "bring", freeze)
    monkeypatch.setattr(run_watch, "drop_connection", lambda action: None)
    entry: Any = {"begun": 0.0}
    assert made._poll("node1", options, entry, {}) is None
    assert "run" not in entry
    assert entry["silent_since"]


def test_the_page_shows_what_all_processes_have_seen(watch, folder, tmp_path):
    made, options = watch
    options["live_page"] = str(folder.parent)
    Ledger(tmp_path / "run-watch").write("node1", {"begun": 0.0, "seen": 1.0, "run": ROWS[0]["run"]})
    made._renew_page(last=True)
    page = (folder / "live.html").read_text()
    told = json.loads(page.split('type="application/json">')[1].split("</script>")[0])["live"]
    assert [cells[0] for cells in told["cells"]] == ["node1"]
