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
from pathlib import Path
from typing import Any

import pytest
from trio import HOSTS, PATIENCE, Played, Trio, cut, mend, name, on, podman, prepare, until

RUN = "alone"
PAIR = ("desktop", "laptop")
SETTINGS = {
    "target": ",".join(PAIR), "ddp_run": RUN, "ddp_restarts": 0, "ddp_min_hosts": 0, "ddp_survive_reboot": False, "ddp_timeout": 300,
}  # fmt: skip
BASE = f"/home/{HOSTS['laptop']}/nanochat"
# Seconds within which a fault of a watched run must be named.
LIMIT = 120.0


class Pair(Trio):
    """The two hosts and their run."""

    def start(self, tag: str) -> None:
        """Start the run; the controller is gone after its first step."""
        self.played("nanochat.ddp.train", "-e", "watch=false", "--tags", tag, **SETTINGS)
        self.goes_on()

    def goes_on(self) -> None:
        """Steps are made from here on."""
        step = self.newest_step()
        until("further steps", lambda: self.newest_step() > step + 5, PATIENCE)

    def newest_step(self) -> int:
        return int(self.events("laptop", "step", RUN)[-1]["step"])

    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / RUN / "doctor.json").read_text())["verdict"])

    def examined(self) -> tuple[dict[str, Any], Played]:
        """The doctor called by hand: its verdict, and the play."""
        played = self.play("nanochat.ddp.doctor", ddp_json=True, **SETTINGS)
        return self.verdict(), played

    def judged(self, make: Callable[[], object], mend_it: Callable[[], object]) -> dict[str, Any]:
        """Watch the run, make a fault, and mend it; the verdict of the doctor whom the watching calls."""
        found, log = self.folder / RUN / "doctor.json", self.folder / "watch.log"
        found.unlink(missing_ok=True)
        with log.open("w") as output:
            watching = subprocess.Popen(
                self.argv("nanochat.ddp.train", "--tags", "launch", **SETTINGS),
                env=self.env, cwd=self.folder, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            until("it is watched", lambda: "tok/s" in log.read_text(), PATIENCE)
            begun = time.monotonic()
            make()
            until(f"a verdict; {log.read_text()}", found.exists, LIMIT)
            print(f"named after {time.monotonic() - begun:.0f} s")
            time.sleep(0.2)
        finally:
            mend_it()
            os.killpg(watching.pid, signal.SIGKILL)
            watching.wait()
        return self.verdict()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    for host in PAIR:
        prepare(host)
    made.played("nanochat.ddp.train", "-e", "watch=false", **SETTINGS)
    made.goes_on()
    yield made
    made.played("nanochat.ddp.stop", **SETTINGS)


def test_field_22_of_a_healthy_run_the_doctor_says_so_in_one_sentence(pair: Pair) -> None:
    one, played = pair.examined()
    assert played.code == 0, played.output
    assert one["seen"].startswith("All ranks make progress (at step ")
    # On a busy machine a rank may wait for a core; the doctor then says that, and nothing else.
    assert one["code"] == "healthy" or (one["code"] == "healthy-slow" and "waits for a core" in one["seen"]), one
    assert one["seen"].count(". ") == 0 and one["seen"].endswith(".")


def test_field_17_another_load_on_a_host_is_named(pair: Pair) -> None:
    on("laptop", "for i in 1 2 3; do setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!; done >/tmp/hogs")
    try:
        one, played = pair.examined()
    finally:
        on("laptop", "for pid in $(cat /tmp/hogs); do kill -KILL $pid; done")
    assert played.code == 0, played.output
    assert one["code"] in ("healthy-slow", "rank-slow")
    # Its arguments may hold what its owner shows nobody, so it is named by its program.
    named = re.search(r"rank 1 \(laptop\): pid (\d+) of root \(sh\) takes", one["seen"])
    assert named and named[1] in on("laptop", "cat /tmp/hogs").split(), one["seen"]


def test_field_17_a_limit_that_holds_a_rank_back_is_named(pair: Pair) -> None:
    podman("update", "--cpus", "0.1", name("laptop"))
    try:
        one, played = pair.examined()
    finally:
        # It cannot be removed, only raised.
        podman("update", "--cpus", str(os.cpu_count()), name("laptop"))
    assert played.code == 0, played.output
    assert one["code"] in ("healthy-slow", "rank-slow")
    # On a busy machine it may get so little CPU time that it never reaches the limit.
    reason = r"its cgroup's CPU limit throttles it|it waits for a core"
    assert re.search(rf"rank 1 \(laptop\).*({reason}) .*%", one["seen"]), one
    pair.goes_on()


def test_field_19_by_hand_the_doctor_names_a_stopped_rank_at_once(pair: Pair) -> None:
    pid = pair.pid("laptop", RUN)
    on("laptop", f"kill -STOP {pid}")
    try:
        one, played = pair.examined()
    finally:
        on("laptop", f"kill -CONT {pid}")
    assert played.code == 2, played.output
    assert (one["code"], one["host"]) == ("rank-frozen", "laptop") and f"kill -CONT {pid}" in one["remedy"]
    pair.goes_on()


def test_field_19_a_frozen_host_is_named(pair: Pair) -> None:
    verdict = pair.judged(lambda: podman("pause", name("laptop")), lambda: podman("unpause", name("laptop")))
    assert (verdict["code"], verdict["host"]) == ("rank-host-no-answer", "laptop")
    pair.goes_on()


def test_field_19_a_link_that_goes_dark_is_named(pair: Pair) -> None:
    verdict = pair.judged(lambda: cut("laptop", "desktop"), lambda: mend("laptop"))
    assert verdict["code"] == "link-cut" and {verdict["host"], verdict["peer"]} == set(PAIR)


def test_field_19_a_rank_killed_for_want_of_memory_is_named(pair: Pair) -> None:
    def limit(size: str) -> None:
        podman("update", "--memory", size, "--memory-swap", size, name("laptop"))

    def fill() -> None:
        # The rank is the one that the kernel is to take, and something else wants the memory.
        on("laptop", f"echo 1000 >/proc/{pair.pid('laptop', RUN)}/oom_score_adj")
        used = on("laptop", "cat /sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat 2>/dev/null; true")
        held = re.search(r"^(?:total_rss|anon) (\d+)", used, re.M)
        assert held, used
        limit(str(int(held[1]) + (60 << 20)))
        on("laptop", "python3 -c 'x = bytearray(200 << 20)'", check=False)

    pair.start("restart")
    verdict = pair.judged(fill, lambda: limit("16g"))
    assert (verdict["code"], verdict["host"]) == ("rank-oom", "laptop")


def test_files_that_differ_are_named_before_the_start(pair: Pair) -> None:
    """field_07 and field_09: a shard is gone from the worker's store, and a file of its trainer was changed by hand."""
    pair.played("nanochat.ddp.stop", **SETTINGS)
    code = Path(BASE, "trainer/nanochat/kit/common.py")
    shard = on("laptop", f"ls {BASE}/data/*/shard_00001.parquet").strip()
    on("laptop", f"cp -p {code} /root/code && echo '# repaired by hand' >>{code} && mv {shard} /root/shard")
    try:
        played = pair.play("nanochat.ddp.preflight", ddp_json=True, preflight_measure_seconds=0, **SETTINGS)
    finally:
        on("laptop", f"cp -p /root/code {code} && cp -p /root/shard {shard}")
    assert played.code != 0
    found = {(one["code"], one["host"]): one for one in played.document()["findings"]}
    assert found["trainer-differs", "laptop"]["peer"] == "desktop"
    assert "shard_00001.parquet missing" in found["data-differs", "laptop"]["seen"]
