# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The processes that watch a run share what they see, and one of them tells a person."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import watch
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import Call
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.watch import Ledger, Watch, node_of
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display import progress


def test_a_ledger_tells_of_hosts_with_any_name(tmp_path):
    ledger = Ledger(tmp_path / "new")
    assert ledger.read("a/b") == {}
    ledger.write("a/b", {"over": "finished"})
    assert Ledger(tmp_path / "new").read("a/b") == {"over": "finished"}


def test_a_host_without_a_run_dir_is_named():
    nodes = [{"host": "host1", "run_dir": "/runs/d4"}, {"host": "host2"}]
    assert node_of("host1", nodes) is nodes[0]
    for name in ("host2", "host3"):
        with pytest.raises(AnsibleError, match=f"The node of {name} has no run_dir"):
            node_of(name, nodes)


def test_where_lines_stay_there_are_fewer_of_them_the_longer_it_takes(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    assert progress.is_due("step 2", "step 1", since=997.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=999.0, begun=990.0)
    assert not progress.is_due("step 2", "step 2", since=900.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=960.0, begun=500.0)
    assert progress.is_due("step 2", "step 1", since=939.0, begun=-5000.0)


def test_one_of_several_processes_tells_where_the_run_is(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(watch.display, "display", lambda line, stderr: said.append((line, stderr)))
    action: Any = SimpleNamespace(_task=SimpleNamespace(_uuid="1", delegate_to=None))
    call = Call(action, {"nodes": [{"host": "host1"}, {"host": "host2"}]}, {"inventory_hostname": "host1"})
    one, another = (Watch(call, Ledger(tmp_path)) for dummy in range(2))
    one.tell()
    assert not said, "nothing was seen yet"
    now = watch.time.monotonic()
    for host in ("host1", "host2"):
        one.ledger.write(host, {"begun": now, "run": {"state": "running", "phase": "data"}, "seen": now})
    one.tell()
    another.tell()
    assert said == [("starting: host1, host2 opening the data", True)]
    one.ledger.path("").unlink()
    with Ledger(tmp_path).claim("") as claimed:
        assert claimed
        another.tell()
    assert len(said) == 1
