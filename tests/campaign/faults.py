# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can go wrong with two machines at home, made for real and taken back again.

Each fault is a generator: what it does, a `yield` while it lasts (its sentence says what was done), and its end. Whatever a user
would have to do by hand afterwards (free the disk, plug the cable in, switch the machine on) is in the end of the fault.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

from hosts import ADDRESS, BASE, DISK_MEGABYTES, NAMES, NETWORK, Hosts, command, on, until


class Scene:
    """What a fault may touch."""

    def __init__(self, hosts: Hosts, run: str, chance: random.Random, play: Any) -> None:
        self.hosts, self.run, self.chance, self.play = hosts, run, chance, play
        self.host = chance.choice(NAMES)

    def pid(self) -> int | None:
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
    yield f"the rank on {scene.host} is stopped, and continued later" if pid else f"no rank to stop on {scene.host}"
    if pid:
        on(scene.host, f"kill -CONT {pid}", check=False)


def freeze_host(scene: Scene) -> Iterator[str]:
    command("podman", "pause", f"{NETWORK}-{scene.host}")
    yield f"{scene.host} is frozen, and goes on later"
    command("podman", "unpause", f"{NETWORK}-{scene.host}")


def cut_link(scene: Scene) -> Iterator[str]:
    """In both directions between the two hosts; the controller still reaches them."""
    other = ADDRESS[NAMES[1 - NAMES.index(scene.host)]]
    on(scene.host, f"ip route add blackhole {other}/32")
    yield f"the link between the hosts is cut on {scene.host}, and mended later"
    on(scene.host, f"ip route del blackhole {other}/32")


def slow_link(scene: Scene) -> Iterator[str]:
    on(scene.host, "tc qdisc add dev eth0 root tbf rate 2mbit burst 32kb latency 200ms")
    yield f"the link of {scene.host} is slow (2 Mbit/s) for a while"
    on(scene.host, "tc qdisc del dev eth0 root")


def full_disk(scene: Scene) -> Iterator[str]:
    on(scene.host, f"dd if=/dev/zero of={BASE}/filler bs=1M count={DISK_MEGABYTES} 2>/dev/null", check=False)
    yield f"the disk of {scene.host} is full, and has room again later"
    on(scene.host, f"rm -f {BASE}/filler")


def spoil(scene: Scene, hosts: tuple[str, ...], how: str) -> str:
    """Tear or flip a bit in the newest model file of each of these hosts."""
    said = []
    for host in hosts:
        folder = f"{BASE}/runs/{scene.run}/base_checkpoints/{scene.run}"
        newest = on(host, f"ls {folder}/model_*.pt 2>/dev/null | sort | tail -n 1", check=False).strip()
        if not newest:
            said.append(f"no checkpoint on {host}")
            continue
        if how == "torn":
            on(host, f"truncate -s 1000 {newest}", check=False)
        else:
            on(host, f"printf '\\377' | dd of={newest} bs=1 seek=5000 conv=notrunc 2>/dev/null", check=False)
        said.append(f"{newest.rpartition('/')[2]} on {host} is {how}")
    return "; ".join(said)


def torn_checkpoint(scene: Scene) -> Iterator[str]:
    yield spoil(scene, (scene.host,), "torn")


def flipped_checkpoint_on_both(scene: Scene) -> Iterator[str]:
    yield spoil(scene, NAMES, "flipped")


def interrupt_controller(scene: Scene) -> Iterator[str]:
    with contextlib.suppress(ProcessLookupError):
        scene.play.process.send_signal(signal.SIGINT)
    yield "Ctrl-C at the controller"


def two_controllers(scene: Scene) -> Iterator[str]:
    other = scene.play.again()
    yield "the same playbook from a second controller at the same time"
    other.finish()


def power_cut(scene: Scene) -> Iterator[str]:
    """Everything but the disk is lost."""
    command("podman", "kill", "--signal", "KILL", f"{NETWORK}-{scene.host}")
    yield f"{scene.host} loses its power, and starts again later"
    command("podman", "start", f"{NETWORK}-{scene.host}")
    until(f"{scene.host} is up", lambda: on(scene.host, "test -e /proc/1 && echo up", check=False))
    if scene.host == "desktop":
        on(scene.host, "ufw --force enable")


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_rank, stop_and_continue, freeze_host, cut_link, slow_link, full_disk, torn_checkpoint, flipped_checkpoint_on_both,
        interrupt_controller, two_controllers, power_cut,
    )
}  # fmt: skip
