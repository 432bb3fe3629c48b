# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A storm: faults drawn by lot hit three hosts while they train; at the end nothing is lost that the docs do not say may be.

./test.sh molecule:storm                                        # ten minutes
STORM_MINUTES=60 STORM_SEED=7 ./test.sh molecule:storm          # an hour, of a seed
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "membership"), str(HERE.parents[3] / "bench")]

from storm_account import back_by, from_scratch, rows_of_steps, surviving
from trio import HOSTS, Trio, boot, cut, mend, name, on, podman, prepare, shut_down

ALL = tuple(HOSTS)
ROWS = 12
MINUTES = float(os.environ.get("STORM_MINUTES", "10"))
SEED = int(os.environ.get("STORM_SEED", str(time.time_ns() % 10**6)))
PAUSE = (10.0, 60.0)  # seconds between the end of a fault and the next one


class Storm:
    """The faults: each is a generator that does something, yields while it lasts, and takes it back."""

    def __init__(self, trio: Trio, chance: random.Random) -> None:
        self.trio, self.chance = trio, chance
        self.faults: list[Callable[[str], Iterator[str]]] = [
            self.kill_rank, self.kill_rank, self.kill_keeper, self.kill_agent, self.terminate_rank, self.terminate_session,
            self.freeze_rank, self.freeze_host, self.power_cut, self.shut_down, self.cut_one_way, self.cut_both_ways,
            self.slow_link, self.spoil_checkpoint, self.leave_and_join, self.stop_and_train,
        ]  # fmt: skip

    def signal(self, host: str, number: str, pid: int | None) -> None:
        if pid:
            on(host, f"kill -{number} {pid}", check=False)

    def rank(self, host: str) -> int | None:
        with contextlib.suppress(ValueError, KeyError):
            return self.trio.pid(host)
        return None

    def session(self, host: str, key: str) -> int | None:
        return json.loads(self.trio.read(host, "session.json") or "{}").get(key)

    def kill_rank(self, host: str) -> Iterator[str]:
        self.signal(host, "KILL", self.rank(host))
        yield "kill -9 of the rank"

    def kill_keeper(self, host: str) -> Iterator[str]:
        self.signal(host, "KILL", self.session(host, "child_pid"))
        yield "kill -9 of the keeper"

    def kill_agent(self, host: str) -> Iterator[str]:
        on(host, f"pid=$(ps -o ppid= -p {self.rank(host)}) && kill -9 $pid", check=False)
        yield "kill -9 of torchrun"

    def terminate_rank(self, host: str) -> Iterator[str]:
        self.signal(host, "TERM", self.rank(host))
        yield "SIGTERM to the rank"

    def terminate_session(self, host: str) -> Iterator[str]:
        self.signal(host, "TERM", self.session(host, "pid"))
        yield "SIGTERM to the session, then a boot"
        podman("stop", "-t", "0", name(host))
        boot(host)

    def freeze_rank(self, host: str) -> Iterator[str]:
        pid = self.rank(host)
        self.signal(host, "STOP", pid)
        yield "the rank is stopped, and continued"
        self.signal(host, "CONT", pid)

    def freeze_host(self, host: str) -> Iterator[str]:
        podman("pause", name(host))
        yield "the host freezes"
        podman("unpause", name(host))

    def power_cut(self, host: str) -> Iterator[str]:
        podman("stop", "-t", "0", name(host))
        yield "a power cut, then a boot"
        boot(host)

    def shut_down(self, host: str) -> Iterator[str]:
        shut_down(host)
        yield "an orderly shutdown, then a boot"
        boot(host)

    def cut_one_way(self, host: str) -> Iterator[str]:
        cut(host, self.chance.choice([other for other in ALL if other != host]))
        yield "a link cut one way"
        mend(host)

    def cut_both_ways(self, host: str) -> Iterator[str]:
        other = self.chance.choice([other for other in ALL if other != host])
        cut(host, other)
        cut(other, host)
        yield f"the link to {other} cut both ways"
        mend(host)
        mend(other)

    def slow_link(self, host: str) -> Iterator[str]:
        on(host, "tc qdisc add dev eth0 root tbf rate 1mbit burst 64kb latency 400ms")
        yield "a link of 1 Mbit/s"
        on(host, "tc qdisc del dev eth0 root")

    def spoil_checkpoint(self, host: str) -> Iterator[str]:
        folder = f"{self.trio.folder_of(host)}/base_checkpoints/*"
        how = self.chance.choice(
            ["truncate -s 1000 $file", "printf bad | dd of=$file bs=1 seek=5000 conv=notrunc 2>/dev/null"]
        )
        on(host, f"file=$(ls {folder}/model_*.pt | sort | tail -n 1) && {how}", check=False)
        self.signal(host, "KILL", self.rank(host))
        yield "the newest checkpoint is damaged, and the rank killed"

    def leave_and_join(self, host: str) -> Iterator[str]:
        self.trio.play("nanochat.ddp.leave", target=host)
        yield "taken out by hand, and let in again"
        self.trio.play("nanochat.ddp.join", target=host)

    def stop_and_train(self, host: str) -> Iterator[str]:
        self.trio.play("nanochat.ddp.stop")
        yield "stopped by the user, and trained again"
        self.trio.played("nanochat.ddp.train", "-e", "watch=false", "--tags", "launch")

    def hit(self, begun: float) -> None:
        """One fault, told when it begins."""
        fault, host = self.chance.choice(self.faults), self.chance.choice(ALL)
        lasting = self.chance.choice([0.0, 3.0, 8.0, 20.0, 40.0])
        course = fault(host)
        print(f"{time.time() - begun:6.0f} s  {host}: {next(course)} ({lasting:.0f} s)", flush=True)
        time.sleep(lasting)
        for dummy in course:
            pass


def test_a_storm(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {MINUTES:.0f} minutes")
    trio, chance = Trio(tmp_path), random.Random(SEED)
    for host in HOSTS:
        prepare(host)
    trio.played("nanochat.ddp.train", "-e", "watch=false")
    trio.wait_for(*ALL)
    storm, begun, faults = Storm(trio, chance), time.time(), 0
    while time.time() < begun + 60 * MINUTES:
        time.sleep(chance.uniform(*PAUSE))
        storm.hit(begun)
        faults += 1
    trio.wait_for(*ALL)
    ended = time.time()
    trio.played("nanochat.ddp.stop")
    judge(trio, faults, begun, ended)


def judge(trio: Trio, faults: int, begun: float, ended: float) -> None:
    """The promises of the docs: nothing from scratch, never back by more than a save, each row once, the same weights."""
    ends = [trio.events(host, "end")[-1] for host in HOSTS]
    assert [(end["reason"], end["identical"]) for end in ends] == [("stopped", True)] * 3, ends
    assert len({trio.events(host, "digest")[-1]["digest"] for host in HOSTS}) == 1
    told = {host: [json.loads(line) for line in trio.metrics(host)] for host in HOSTS}
    lines = {host: surviving(events) for host, events in told.items()}
    for host, events in told.items():
        assert not from_scratch(events), f"{host} began from scratch: {from_scratch(events)}"
    rows = rows_of_steps(lines)
    assert sorted(rows) == list(range(len(rows))), "steps are missing"
    wrong = {step: count for step, count in rows.items() if count != ROWS}
    assert not wrong, f"steps whose rows are not {ROWS}: {wrong}"
    again = sum(map(back_by, told.values()))
    pace = statistics.median(event["seconds"] for line in lines.values() for event in line.values())
    print(
        f"{faults} faults in {(ended - begun) / 60:.0f} minutes ({faults / (ended - begun) * 3600:.0f} an hour), {len(rows)} steps, "
        f"{again} made again by all hosts together, step efficiency {len(rows) * pace / (ended - begun):.2f}"
    )
