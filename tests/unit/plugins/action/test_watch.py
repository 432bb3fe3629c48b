# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The processes that watch a run share what they see, and one of them tells a person."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import watch
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import Call
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.watch import Ledger, Watch
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display import progress
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of


def test_where_lines_stay_there_are_fewer_of_them_the_longer_it_takes(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    assert progress.is_due("step 2", "step 1", since=997.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=999.0, begun=990.0)
    assert not progress.is_due("step 2", "step 2", since=900.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=960.0, begun=500.0)
    assert progress.is_due("step 2", "step 1", since=939.0, begun=-5000.0)


def test_the_first_hosts_process_tells_where_the_run_is(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(watch.display, "display", lambda line, stderr: said.append((line, stderr)))
    monkeypatch.setattr(watch._configuration, "shows_progress", lambda: False)
    action: Any = SimpleNamespace(_task=SimpleNamespace(_uuid="1", delegate_to=None))
    nodes = [{"host": "host1"}, {"host": "host2"}]
    one, another = (
        Watch(Call(action, {"inventory_hostname": node["host"]}), {"plan": {"nodes": nodes}}, Ledger(tmp_path))
        for node in nodes
    )
    now = watch.time.monotonic()
    for host in ("host1", "host2"):
        one.ledger.write(host, {"begun": now, "run": run_of(phase="data", step=None), "seen": now})
    for process in (another, one, one):
        process.tell()
    assert said == [("starting: host1, host2 opening the data", True)]
