# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts once set up by the whole story, and what was found for each entry of the list of field failures."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "integration")]

from hosts import BASE, RUN, USER, Lab, Training, on, set_flag
from load import Load

FOUND: list[dict] = []
# FAULTS_LOAD=24 runs this many computing processes beside the hosts all the time.
LOAD = int(os.environ.get("FAULTS_LOAD", "0"))
# Seconds within which every fault of a watched run must be named.
LIMIT = 180.0 if LOAD else 120.0
LONGEST = 4 * 3600.0


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Hosts on which the job was trained once, as a user would."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    ready = [
        on(host, f"test -f {BASE[host]}/runs/{RUN}/data/shard_00000.parquet && echo yes", check=False) for host in USER
    ]
    # Preflight is tried alone below, and a step need not be measured here. Hosts that were set up before get the newest trainer.
    words = ["--tags", "trainer"] if ready == ["yes\n", "yes\n"] else ["--tags", "launch"]
    played = made.play("nanochat.ddp.train", *words)
    assert played.code == 0, played.output
    return made


@pytest.fixture(scope="session", autouse=True)
def busy_machine(lab):
    """The load of FAULTS_LOAD, from the set-up of the hosts to the end."""
    load = Load(LOAD, LONGEST)
    load.begin()
    yield
    load.end()


@pytest.fixture(scope="session")
def short_plan(lab):
    """The plan of the inventory, for twenty steps."""
    document, played = lab.plan()
    assert document, played.output
    return document["plan"]


@pytest.fixture(scope="session")
def endless(short_plan):
    """The same for a run that does not end by itself."""
    changed = copy.deepcopy(short_plan)
    for flag, value in {"num-iterations": 1000000, "eval-every": -1, "save-every": -1}.items():
        set_flag(changed, flag, value)
    return changed


@pytest.fixture
def plan(endless):
    """One that a test may change."""
    return copy.deepcopy(endless)


@pytest.fixture
def train(lab):
    """`train(plan)` starts a run that ends with the test."""
    begun = []

    def start(plan, **words):
        begun.append(Training(lab, plan, **words))
        return begun[-1]

    yield start
    for training in begun:
        training.close()


@pytest.fixture
def found(request):
    """`found(what, code, seconds, when)` notes a fault that was named."""
    number = int(re.search(r"field_(\d+)", request.node.name)[1])

    def note(what, code, seconds, when="preflight"):
        assert when != "watch" or seconds < LIMIT, f"{code} after {seconds:.0f} s"
        FOUND.append(
            {
                "field": number,
                "fault": what,
                "code": code,
                "seconds": round(seconds, 1),
                "when": when,
                "test": request.node.name,
            }
        )

    return note


def pytest_sessionfinish():
    path = os.environ.get("FAULTS_RESULTS")
    if path and FOUND:
        Path(path).write_text(json.dumps(sorted(FOUND, key=lambda one: one["field"]), indent=1) + "\n")
