# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which run is meant where a host was away: the one that was started last on any host, in its newest training."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import OFF, one_line
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage


class Hosts(Stage):
    """Attic was away while desktop began d4 again: its older training of d4 came further, and it has tried something else since."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ["attic", "desktop"], ddp_results_dir=f"{folder}/results")
        now = time.time()
        self.run("attic", "d4", 1, 1200, now - 9000)
        self.run("attic", "trial", 7, 10, now - 8000)
        self.run("desktop", "old", 1, 5, now - 99000)
        self.run("desktop", "d4", 2, 40, now - 600)

    def run(self, host: str, name: str, number: int, steps: int, began: float) -> None:
        run = self.folder / host / "runs" / name
        rank = sorted(self.hosts).index(host)
        fake_run.write_history(run, fake_run.history(rank, 2, steps, began, 0.1, name), rank)
        (run / f"log/rank{rank}.log").write_text(f"the log of {name} on {host}\n")
        ended = fake_run.session_of(rank, began, name, ended=began + 0.1 * steps, exit_code=0)
        fake_run.write_json(run / "session.json", ended)
        fake_run.write_json(run / "training.json", {"id": f"{number:016x}", "number": number, "begun": 1})
        places = [self.folder / one / "runs" / name for one in sorted(self.hosts)]
        fake_run.write_json(run / "plan.json", fake_run.plan_for(places, steps, name, sorted(self.hosts)))
        checkpoints = run / "base_checkpoints" / name
        checkpoints.mkdir(parents=True)
        for one in (f"model_{steps:06d}.pt", f"meta_{steps:06d}.json"):
            (checkpoints / one).write_text("{}")


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_the_status_shows_one_run_on_all_hosts(hosts: Hosts) -> None:
    told = hosts.play("nanochat.ddp.status")
    assert told.startswith("run d4, took ")
    assert "attic: the newest run there is trial (-e ddp_run=trial shows that one)" in told
    assert "attic: holds an older training of this run" in told
    assert hosts.play("nanochat.ddp.status", "-e", "ddp_run=trial").startswith("run trial, took ")


def test_the_doctor_goes_by_the_plan_of_the_newest_training(hosts: Hosts) -> None:
    hosts.play("nanochat.ddp.doctor")
    assert (hosts.folder / "results/d4/doctor.json").exists()
    plan = json.loads((hosts.folder / "results/d4/doctor.json").read_text())["plan"]
    assert plan["training"]["iterations"] == 40


def test_the_doctor_does_without_a_host_that_has_left_the_inventory(hosts: Hosts) -> None:
    del hosts.hosts["attic"]
    told = hosts.play("nanochat.ddp.doctor")
    assert "rank 0 (attic) cannot be reached: it is not in this inventory" in told


def test_the_logs_are_those_of_the_same_run(hosts: Hosts) -> None:
    told = hosts.play("nanochat.ddp.logs")
    assert "the log of d4 on attic" in told and "the log of d4 on desktop" in told and "trial" not in told
    assert "attic   | no log yet: no run was started here" in hosts.play("nanochat.ddp.logs", "-e", "ddp_run=old")


def test_who_joins_is_told_that_the_others_have_gone_on(hosts: Hosts) -> None:
    told = hosts.play("nanochat.ddp.join", "-e", "target=attic", code=2)
    assert "attic: its newest run is trial, but on the other hosts it is d4; say which one is meant" in one_line(told)
    told = hosts.play("nanochat.ddp.join", "-e", "target=attic", "-e", "ddp_run=d4", code=2)
    assert "attic: its training of the run d4 is older than that of the other hosts" in one_line(told)


def test_collect_brings_what_is_there_and_names_who_is_missing(hosts: Hosts) -> None:
    hosts.play("nanochat.ddp.collect")
    brought = sorted(path.name for path in hosts.folder.glob("results/d4/**/model_*.pt"))
    assert brought == ["model_000040.pt"]
    hosts.hosts["attic"] = OFF
    told = hosts.play("nanochat.ddp.collect")
    assert "attic: nothing was brought from there, since" in told and "report:" in told
    hosts.hosts["desktop"] = OFF
    told = hosts.play("nanochat.ddp.collect", code=2)
    assert "Nothing was collected: no host that answers has the run, and attic, desktop did not answer." in one_line(
        told
    )


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("join", ["-e", "target=desktop"], "runs/d4/plan.json is missing or damaged; start it with ddp_restarts by train.yml"),
        ("doctor", [], "No host that answers has a run d4 with its plan (plan.json, undamaged) below its base folder"),
    ],
)  # fmt: skip
def test_a_damaged_plan_is_named_by_what_needs_it(hosts: Hosts, name: str, words: list[str], told: str) -> None:
    for path in hosts.folder.glob("*/runs/d4/plan.json"):
        path.write_text('{"format": 1, "nod')
    assert told in one_line(hosts.play(f"nanochat.ddp.{name}", "-e", "ddp_run=d4", *words, code=2))


@pytest.fixture
def without_attic(hosts: Hosts) -> Hosts:
    """Desktop has finished d4, while attic was off, as it still is."""
    hosts.hosts["attic"] = OFF
    began = time.time() - 600
    word = {
        "time": began + 3, "since": began + 4, "what": "training", "state": "finished", "generation": 2, "members": ["desktop"],
        "hears": [], "why": "",
    }  # fmt: skip
    fake_run.write_json(hosts.folder / "desktop/runs/d4/members.json", word)
    return hosts


def test_field_35_a_run_that_finished_without_a_host_is_watched_and_collected(without_attic: Hosts) -> None:
    told = without_attic.play("nanochat.ddp.train", "--tags", "watch,collect", "-e", "ddp_run=d4")
    assert "away" in told and "finished" in told and "FAILED" not in told
    results = without_attic.folder / "results/d4"
    assert (results / "report.html").exists() and (results / "desktop/metrics-rank1.jsonl").exists()


def test_ansibles_own_display_shows_the_status_and_the_verdict_in_lines(without_attic: Hosts) -> None:
    own = {"ANSIBLE_STDOUT_CALLBACK": "default", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    told = "".join(
        without_attic.play(f"nanochat.ddp.{book}", "-e", "ddp_run=d4", **own) for book in ("status", "doctor")
    )
    lines = [line.strip() for line in told.splitlines()]
    assert any(line.startswith('"run d4, took ') for line in lines), told
    (verdict,) = [
        line for line in lines if line.startswith('"not-running: No rank runs: rank 0 (attic) cannot be reached')
    ]
    assert "rank 1 (desktop) finished" in verdict
    assert "\\n" not in told


# Each waits so long for the frozen host.
PLAYBOOKS = {"status": 3, "doctor": 3, "stop": 25, "collect": 3}
PATIENCE = {f"{role}_patience": 3 for role in ("doctor", "find_run", "launch")}


def test_a_host_that_gives_no_answer_is_named_and_nothing_of_ansible_is_on_the_screen(hosts: Hosts) -> None:
    frozen = hosts.folder / "frozen-python"
    frozen.write_text("#!/bin/sh\nexec sleep 60\n")
    frozen.chmod(0o755)
    hosts.hosts["attic"]["ansible_python_interpreter"] = str(frozen)

    def play(name: str) -> str:
        return hosts.play(f"nanochat.ddp.{name}", "-e", "ddp_run=d4", "-e", json.dumps(PATIENCE), code=None)

    with ThreadPoolExecutor() as pool:
        screens = list(pool.map(play, PLAYBOOKS))
    for seconds, screen in zip(PLAYBOOKS.values(), screens, strict=True):
        assert "attic" in screen and f"did not answer within {seconds} s" in screen, screen
    said = "".join([*screens, hosts.errors])
    assert not [noise for noise in ("DEPRECATION", "deprecat", "WARNING", "Traceback", "Origin:") if noise in said], (
        said
    )
