# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of a run that nobody restarts (ddp_restarts: 0), made for real on two hosts, and how preflight, doctor and watch name them.

The tests are one story in their order. Only faults are here whose signs come from a real kernel, container or network:
tests/pins has the verdicts on recorded signs of all others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trio import HOSTS, PATIENCE, Trio, podman, wait_for

RUN = "alone"
PAIR = ("desktop", "laptop")
SETTINGS = {
    "target": ",".join(PAIR), "ddp_restarts": 0, "ddp_min_hosts": 0, "ddp_survive_reboot": False, "ddp_timeout": 300,
}  # fmt: skip
BASE = f"/home/{HOSTS['laptop']}/nanochat"
# Seconds within which a fault of a watched run must be named.
LIMIT = 120.0


class Pair(Trio):
    """The two hosts and their run."""

    def start(self, tag: str) -> None:
        """Start the run; the controller is gone after its first step."""
        self.play("-e", "watch=false", "--tags", tag)
        self.goes_on()

    def goes_on(self) -> None:
        """Steps are made from here on."""
        step = self.newest_step()
        wait_for("further steps", lambda: self.newest_step() > step + 5, PATIENCE)

    def newest_step(self) -> int:
        return int(self.events("laptop", "step")[-1]["step"])

    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / RUN / "doctor.json").read_text())["verdict"])

    def examined(self, code: int = 0) -> dict[str, Any]:
        """The verdict of the doctor called by hand, which ends with this code."""
        self.play(playbook="doctor", code=code, ddp_json=True)
        return self.verdict()

    def judged(self, make: Callable[[], object], mend_it: Callable[[], object]) -> dict[str, Any]:
        """Watch the run, make a fault, and mend it; the verdict of the doctor whom the watching calls."""
        found, log = self.folder / RUN / "doctor.json", self.folder / "watch.log"
        found.unlink(missing_ok=True)
        with log.open("w") as output:
            watching = subprocess.Popen(
                self.argv("train", "--tags", "launch"),
                env=self.env, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for("it is watched", lambda: "tok/s" in log.read_text(), PATIENCE)
            begun = time.monotonic()
            make()
            wait_for(f"a verdict; {log.read_text()}", found.exists, LIMIT)
            print(f"named after {time.monotonic() - begun:.0f} s")
            time.sleep(0.2)
        finally:
            mend_it()
            os.killpg(watching.pid, signal.SIGKILL)
            watching.wait()
        return self.verdict()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"), RUN, **SETTINGS)
    made.play("-e", "watch=false")
    made.goes_on()
    yield made
    made.play(playbook="stop")


def test_field_22_of_a_healthy_run_the_doctor_says_so_in_one_sentence(pair: Pair) -> None:
    one = pair.examined()
    assert one["seen"].startswith("All ranks make progress (at step ")
    # On a busy machine a rank may wait for a core; the doctor then says that, and nothing else.
    assert one["code"] == "healthy" or (one["code"] == "healthy-slow" and "waits for a core" in one["seen"]), one
    assert one["seen"].count(". ") == 0 and one["seen"].endswith(".")


def test_field_17_another_load_on_a_host_is_named(pair: Pair) -> None:
    pair.on(
        "laptop", "for i in 1 2 3; do setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!; done >/tmp/hogs"
    )
    try:
        one = pair.examined()
    finally:
        pair.on("laptop", "for pid in $(cat /tmp/hogs); do kill -KILL $pid; done")
    assert one["code"] in ("healthy-slow", "rank-slow")
    # Its arguments may hold what its owner shows nobody, so it is named by its program.
    named = re.search(r"rank 1 \(laptop\): pid (\d+) of root \(sh\) takes", one["seen"])
    assert named and named[1] in pair.on("laptop", "cat /tmp/hogs").split(), one["seen"]


def test_field_17_a_limit_that_holds_a_rank_back_is_named(pair: Pair) -> None:
    podman("update", "--cpus", "0.1", pair.container("laptop"))
    try:
        one = pair.examined()
    finally:
        # It cannot be removed, only raised.
        podman("update", "--cpus", str(os.cpu_count()), pair.container("laptop"))
    assert one["code"] in ("healthy-slow", "rank-slow")
    # On a busy machine it may get so little CPU time that it never reaches the limit.
    reason = r"its cgroup's CPU limit throttles it|it waits for a core"
    assert re.search(rf"rank 1 \(laptop\).*({reason}) .*%", one["seen"]), one
    pair.goes_on()


def test_field_19_by_hand_the_doctor_names_a_stopped_rank_at_once(pair: Pair) -> None:
    pid = pair.pid("laptop")
    pair.on("laptop", f"kill -STOP {pid}")
    try:
        one = pair.examined(code=2)
    finally:
        pair.on("laptop", f"kill -CONT {pid}")
    assert (one["code"], one["host"]) == ("rank-frozen", "laptop") and f"kill -CONT {pid}" in one["remedy"]
    pair.goes_on()


def test_field_19_a_frozen_host_is_named(pair: Pair) -> None:
    verdict = pair.judged(lambda: pair.freeze("laptop"), lambda: pair.wake("laptop"))
    assert (verdict["code"], verdict["host"]) == ("rank-host-no-answer", "laptop")
    pair.goes_on()


def test_field_19_a_link_that_goes_dark_is_named(pair: Pair) -> None:
    verdict = pair.judged(lambda: pair.cut("laptop", "desktop"), lambda: pair.repair("laptop"))
    assert verdict["code"] == "link-cut" and {verdict["host"], verdict["peer"]} == set(PAIR)


def test_field_19_a_rank_killed_for_want_of_memory_is_named(pair: Pair) -> None:
    def limit(size: str) -> None:
        podman("update", "--memory", size, "--memory-swap", size, pair.container("laptop"))

    def fill() -> None:
        # The rank is the one that the kernel is to take, and something else wants the memory.
        pair.on("laptop", f"echo 1000 >/proc/{pair.pid('laptop')}/oom_score_adj")
        used = pair.on("laptop", "cat /sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat 2>/dev/null; true")
        held = re.search(r"^(?:total_rss|anon) (\d+)", used, re.M)
        assert held, used
        limit(str(int(held[1]) + (60 << 20)))
        pair.on("laptop", "python3 -c 'x = bytearray(200 << 20)'", code=None)

    pair.start("restart")
    verdict = pair.judged(fill, lambda: limit("16g"))
    assert (verdict["code"], verdict["host"]) == ("rank-oom", "laptop")
