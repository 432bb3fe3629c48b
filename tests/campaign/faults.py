# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of two machines at home, made for real and undone again.

Each fault is a generator: what it does, a `yield` while it lasts (its sentence says what was done), and its end. Whatever a user
would have to do by hand afterwards (free the disk, plug the cable in, switch the machine on) is in the end of the fault.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from hosts import ADDRESS, BASE, DISK_MEGABYTES, NAMES, SLOW, Hosts, cable, command, container, freeze, limit_link, on
from plays import PLAY_SECONDS


class Scene:
    """The parts of a site that a fault may touch."""

    def __init__(self, hosts: Hosts, run: str, steps: int, chance: random.Random, play: Any) -> None:
        self.hosts, self.run, self.steps, self.play = hosts, run, steps, play
        self.host = chance.choice(NAMES)
        # Seconds for which a rank that had to be waited for has run before the fault.
        self.into_start = chance.uniform(0.0, 15.0)

    def pid(self) -> int | None:
        """The rank on the host; if there is none yet, wait for the one that the playbook starts."""
        pid = self.hosts.trainer(self.host, self.run)
        if pid is not None:
            return pid
        while pid is None and self.play.process.poll() is None and time.monotonic() < self.play.begun + PLAY_SECONDS:
            time.sleep(0.5)
            pid = self.hosts.trainer(self.host, self.run)
        time.sleep(self.into_start)
        return self.hosts.trainer(self.host, self.run)


Fault = Callable[[Scene], Iterator[str]]


def kill_rank(scene: Scene) -> Iterator[str]:
    pid = scene.pid()
    if pid:
        on(scene.host, f"kill -9 {pid}", check=False)
    yield f"kill -9 of the rank on {scene.host}" if pid else f"no rank to kill on {scene.host}"


def stop_and_continue(scene: Scene) -> Iterator[str]:
    pid = scene.pid()
    if pid:
        on(scene.host, f"kill -STOP {pid}", check=False)
    yield f"the rank on {scene.host} is stopped, and continued" if pid else f"no rank to stop on {scene.host}"
    if pid:
        on(scene.host, f"kill -CONT {pid}", check=False)


def freeze_host(scene: Scene) -> Iterator[str]:
    freeze(scene.host)
    yield f"{scene.host} is frozen, and goes on"
    command("podman", "unpause", container(scene.host))


def cut_link(scene: Scene) -> Iterator[str]:
    """Packets of either host get lost on the way to the other; the controller still reaches both."""
    wrong = "lladdr 02:00:00:00:00:99 nud permanent dev eth0"
    for host in NAMES:
        on(host, f"ip neigh replace {ADDRESS[NAMES[1 - NAMES.index(host)]]} {wrong}")
    yield "the link between the hosts is cut, and connected again"
    for host in NAMES:
        on(host, f"ip neigh del {ADDRESS[NAMES[1 - NAMES.index(host)]]} dev eth0", check=False)


def pull_cable(scene: Scene) -> Iterator[str]:
    cable(scene.host, "down")
    yield f"the network cable of {scene.host} is pulled, and plugged in again"
    cable(scene.host, "up")


def slow_link(scene: Scene) -> Iterator[str]:
    limit_link(scene.host, SLOW)
    yield f"the link of {scene.host} carries 2 Mbit/s, and 50 Mbit/s again"
    limit_link(scene.host)


def full_disk(scene: Scene) -> Iterator[str]:
    on(scene.host, f"dd if=/dev/zero of={BASE}/filler bs=1M count={DISK_MEGABYTES} 2>/dev/null", check=False)
    yield f"the disk of {scene.host} is full, and has room again"
    on(scene.host, f"rm -f {BASE}/filler")


def spoil(scene: Scene, hosts: tuple[str, ...], how: str) -> str:
    """Tear the newest model file of each of these hosts, or flip bits in it."""
    said = []
    for host in hosts:
        folder = f"{BASE}/runs/{scene.run}/base_checkpoints/{scene.run}"
        # Not the last step's: it is compared in the end, and nothing could restore it.
        newest = on(host, f"ls {folder}/model_*.pt | grep -v {scene.steps:06d} | sort | tail -n 1", check=False).strip()
        if not newest:
            said.append(f"no checkpoint on {host}")
            continue
        if how == "torn":
            on(host, f"truncate -s 1000 {newest}", check=False)
        else:
            on(host, f"printf '\\125\\252\\125' | dd of={newest} bs=1 seek=5000 conv=notrunc 2>/dev/null", check=False)
        said.append(f"{newest.rpartition('/')[2]} on {host} is {how}")
    return "; ".join(said)


def spoilt_checkpoint(how: str, on_both: bool = False) -> Fault:
    def fault(scene: Scene) -> Iterator[str]:
        yield spoil(scene, NAMES if on_both else (scene.host,), how)

    return fault


def interrupt_controller(scene: Scene) -> Iterator[str]:
    """Ctrl-C reaches the whole process group, as from a terminal."""
    over = scene.play.process.poll() is not None
    with contextlib.suppress(ProcessLookupError):
        if not over:
            os.killpg(scene.play.process.pid, signal.SIGINT)
    yield "Ctrl-C at the controller, whose playbook was over" if over else "Ctrl-C at the controller"


def two_controllers(scene: Scene) -> Iterator[str]:
    other = scene.play.again()
    yield "the same playbook from a second controller"
    scene.play.heard(*other.finish())


def power_cut(scene: Scene) -> Iterator[str]:
    """Everything but the disk is lost."""
    scene.hosts.power_off(scene.host)
    yield f"{scene.host} loses its power, and starts again"
    scene.hosts.power_on(scene.host)


# Faults without a duration.
INSTANT: dict[str, Fault] = {
    "kill_rank": kill_rank,
    "torn_checkpoint": spoilt_checkpoint("torn"),
    "torn_checkpoint_on_both": spoilt_checkpoint("torn", on_both=True),
    "flipped_checkpoint": spoilt_checkpoint("flipped"),
    "flipped_checkpoint_on_both": spoilt_checkpoint("flipped", on_both=True),
    "interrupt_controller": interrupt_controller,
    "two_controllers": two_controllers,
}
LASTING = (stop_and_continue, freeze_host, cut_link, pull_cable, slow_link, full_disk, power_cut)
FAULTS = INSTANT | {fault.__name__: fault for fault in LASTING}
