# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who goes along with whom, what the processes tell each other, and what the display is told of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleError
from ansible_collections.nanochat.ddp.plugins.action import run_watch
from ansible_collections.nanochat.ddp.plugins.action.run_watch import ActionModule, node_of, seen_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run.health import UNSEEN
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _configuration
from ansible_collections.nanochat.ddp.plugins.plugin_utils._company import Ledger, common_password, taken_along
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display import progress
from ansible_collections.nanochat.ddp.plugins.plugin_utils._display.progress import RunProgress
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._run.keepers_words import run_of

HOSTS = [f"host{number}" for number in range(8)]


def test_every_host_beyond_the_forks_goes_along_with_one_that_has_a_process():
    assert taken_along(HOSTS, "host0", 5) == ["host5"]
    assert taken_along(HOSTS, "host2", 5) == ["host7"]
    assert taken_along(HOSTS, "host3", 5) == taken_along(HOSTS, "host7", 5) == []
    assert taken_along(HOSTS, "host0", 1) == HOSTS[1:]
    assert taken_along(HOSTS, "one that failed", 1) == []


@pytest.mark.parametrize("forks", [1, 2, 3, 7, 8, 100])
def test_nobody_is_forgotten_or_taken_twice(forks):
    assert sorted(HOSTS[:forks] + [other for host in HOSTS for other in taken_along(HOSTS, host, forks)]) == HOSTS


def test_a_ledger_tells_of_hosts_with_any_name(tmp_path):
    ledger = Ledger(tmp_path / "new")
    assert ledger.read("a/b") == {}
    ledger.write("a/b", {"over": "finished"})
    assert Ledger(tmp_path / "new").read("a/b") == {"over": "finished"}


def test_a_host_is_followed_by_one_process_at_a_time(tmp_path):
    ledger = Ledger(tmp_path)
    claim = ledger.claim("host1", wait=True)
    assert claim is not None
    assert ledger.claim("host1", wait=False) is None
    assert ledger.claim("host2", wait=False) is not None
    claim.close()
    assert ledger.claim("host1", wait=False) is not None


def test_the_password_of_one_host_is_not_tried_on_others():
    action: Any = SimpleNamespace(_play_context=SimpleNamespace(password="asked for"))
    assert common_password(action, {"ansible_user": "me"}) == "asked for"
    assert common_password(action, {"ansible_ssh_pass": "its own"}) is None


def test_a_host_that_is_followed_later_is_told_of_with_the_line_to_add():
    assert _configuration.followed_later("host7", "it has no pipelining", 8, 5) == (
        "host7 is followed only after others have ended: it has no pipelining. Ansible handles 5 hosts at a time and the job has 8; "
        "add to ansible.cfg below [defaults]: forks = 8 (or once: --forks 8)"
    )


def test_a_host_without_a_run_dir_is_named():
    nodes = [{"host": "host1", "run_dir": "/runs/d4"}, {"host": "host2"}]
    assert node_of("host1", nodes) is nodes[0]
    for name in ("host2", "host3"):
        with pytest.raises(AnsibleError, match=f"The node of {name} has no run_dir"):
            node_of(name, nodes)


def test_of_hosts_that_go_along_what_was_seen_is_told_and_how_old_it_is(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.write("host5", {"begun": 90.0, "run": {"state": "running"}, "seen": 96.0})
    ledger.write("host6", {"begun": 90.0, "silent_since": 95.0})
    ledger.write("host7", {"begun": 90.0, "asked": 91.0})
    assert seen_of(["host5", "host6", "host7", "host8"], ledger, now=100.0) == {
        "host5": {"run": {"state": "running"}, "reachable": True, "verdict": None, "age": 4.0, "watched": 10.0},
        "host6": {
            "run": UNSEEN,
            "reachable": False,
            "verdict": None,
            "age": 0.0,
            "watched": 10.0,
        },
    }


def test_a_host_that_nobody_looks_at_for_now_is_not_taken_for_a_silent_one(tmp_path, monkeypatch):
    def give_up(host, variables):
        ledger.write(host, {"begun": 90.0, "asked": 91.0})
        raise AnsibleError("it can be asked by a module only")

    ledger, watch = Ledger(tmp_path), object.__new__(ActionModule)
    monkeypatch.setattr(watch, "_ledger", lambda: ledger, raising=False)
    monkeypatch.setattr(watch, "_poll_and_judge", give_up, raising=False)
    with pytest.raises(AnsibleError, match="module only"):
        watch.follow("host7", {})
    assert ledger.read("host7") == {}


def test_where_lines_stay_there_are_fewer_of_them_the_longer_it_takes(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    assert progress.is_due("step 2", "step 1", since=997.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=999.0, begun=990.0)
    assert not progress.is_due("step 2", "step 2", since=900.0, begun=990.0)
    assert not progress.is_due("step 2", "step 1", since=960.0, begun=500.0)
    assert progress.is_due("step 2", "step 1", since=939.0, begun=-5000.0)


def test_one_of_several_processes_tells_where_the_run_is(tmp_path, monkeypatch):
    monkeypatch.setattr(run_watch, "ledger_of", lambda action, name: Ledger(tmp_path / name))
    monkeypatch.setattr(
        ActionModule, "_options", lambda self: {"nodes": [{"host": "host1"}, {"host": "host2"}]}, raising=False
    )
    said = []
    monkeypatch.setattr(run_watch.display, "display", lambda line, stderr: said.append((line, stderr)))
    object.__new__(ActionModule)._tell()
    assert not said, "nothing was seen yet"
    now = run_watch.time.time()
    for host in ("host1", "host2"):
        entry = {"begun": now, "run": run_of(phase="data", step=None), "seen": now}
        Ledger(tmp_path / "run-watch").write(host, entry)
    watches = [object.__new__(ActionModule) for dummy in range(2)]
    for watch in watches:
        watch._tell()
    assert said == [("starting: host1, host2 opening the data", True)]
    with Ledger(tmp_path / "told").claim("line", wait=True):
        (tmp_path / "told" / f"{b'line'.hex()}.json").unlink()
        watches[0]._tell()
    assert len(said) == 1


def test_the_display_takes_what_one_result_tells_of_several_hosts():
    terminal: Any = SimpleNamespace(quiet=True)
    steps: Any = SimpleNamespace(forget_task=lambda: None, tell=lambda text: None)
    shown = RunProgress(terminal, steps)
    run = run_of(step=3)
    other = {"run": run, "reachable": False, "verdict": "lost", "age": 20.0}
    shown.take("host1", {"over": False, "run": run, "verdict": None, "others": {"host6": other}}, final=False)
    own, along = shown.rows["host1"], shown.rows["host6"]
    told = (own.seen.verdict, own.seen.silent, along.seen.verdict, along.seen.silent)
    assert told == (None, 0.0, "lost", math.inf)
    assert own.looked - along.looked == pytest.approx(20, abs=1)
    shown.take("host2", {"over": True, "lines": []}, final=True)
    assert "host2" not in shown.rows
