# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random faults of a storm: each is a generator that causes a fault, yields while it lasts, and undoes it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from storm_lab import HOSTS, Lab

# Duration of a fault in seconds.
LASTING = (0.0, 3.0, 8.0, 20.0, 30.0)
STOPPED = "stopped by the user, and started again"
FLAPS, FLAP_SECONDS = 6, 1.5
SPOILT_AT = 5000
# Ends every Python of a host but its keeper's.
BROKEN = "import os, sys\nif not any('keeper.py' in word for word in sys.orig_argv):\n    os._exit(9)\n"
# Speaks in a keeper's place; the arguments are the run folder, and each host with its address.
LIAR = """
import json, random, sys, time
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership, talk
folder, *places = sys.argv[1:]
settings = json.load(open(folder + "/.keeper/keeper.json"))
peers = [talk.KeeperAddress(*place.split("="), 29400) for place in places]
me = next(peer for peer in peers if peer.host == settings["host"])
liar = talk.Messenger(me, tuple(peer for peer in peers if peer != me), settings["secret"], settings["launch"])
liar.start()
state = membership.KeeperState(me.host, "training", hears=tuple(peer.host for peer in peers))
while True:
    liar.publish(state._replace(**random.choice(({"promised": 2**53 - 1}, {"state": "king"}, {"steps": -1}, {"outranked": 2**60}))))
    time.sleep(0.5)
"""


class Faults:
    """The faults of a host, and their random choice."""

    def __init__(self, lab: Lab, chance: random.Random) -> None:
        self.lab, self.chance = lab, chance
        signals = [(what, number) for what in ("rank", "keeper") for number in (signal.SIGKILL, signal.SIGTERM)]
        self.kinds: list[Callable[[str], Iterator[str]]] = [
            *(self.signalled(what, number) for what, number in signals), self.signalled("rank", signal.SIGKILL),
            *(self.stopped(what) for what in ("rank", "keeper")), self.freezes, self.loses_power, self.shuts_down,
            self.cut_one_way, self.cut_off, self.pair_cut, self.flaps, self.slow, self.full_disk, self.spoilt, self.stopped_by_user,
            self.cannot_start, self.says_nonsense, self.stopped_on_a_full_disk,
        ]  # fmt: skip

    def draw(self) -> tuple[str, float, Iterator[str]]:
        """Draw a host, a duration and a fault."""
        host, lasting = self.chance.choice(HOSTS), self.chance.choice(LASTING)
        return host, lasting, self.chance.choice(self.kinds)(host)

    def pid(self, what: str, host: str) -> int | None:
        found: int | None = getattr(self.lab, what)(host)
        return found

    def another(self, host: str) -> str:
        return self.chance.choice([other for other in HOSTS if other != host])

    def signalled(self, what: str, number: signal.Signals) -> Callable[[str], Iterator[str]]:
        def fault(host: str) -> Iterator[str]:
            self.lab.send(number, self.pid(what, host))
            yield f"{number.name} of the {what}"

        return fault

    def stopped(self, what: str) -> Callable[[str], Iterator[str]]:
        def fault(host: str) -> Iterator[str]:
            pid = self.pid(what, host)
            self.lab.send(signal.SIGSTOP, pid)
            yield f"SIGSTOP of the {what}"
            self.lab.send(signal.SIGCONT, pid)

        return fault

    def freezes(self, host: str) -> Iterator[str]:
        pids = self.lab.processes(host)
        self.lab.send(signal.SIGSTOP, *pids)
        yield "the host freezes"
        self.lab.send(signal.SIGCONT, *pids)

    def loses_power(self, host: str) -> Iterator[str]:
        self.lab.power(host, on=False)
        yield "a power cut, then a boot"
        self.lab.power(host, on=True)

    def shuts_down(self, host: str) -> Iterator[str]:
        """Shut down as init does: SIGTERM for all processes, later SIGKILL for the rest."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            self.lab.send(number, *self.lab.processes(host))
        yield "an orderly shutdown, then a boot"
        self.lab.power(host, on=False)
        self.lab.power(host, on=True)

    def cut_one_way(self, host: str) -> Iterator[str]:
        self.lab.cut(host, *(other for other in HOSTS if other != host))
        yield "hears nobody (cut one way)"
        self.lab.mend(host)

    def cut_off(self, host: str) -> Iterator[str]:
        self.lab.cable(host, "down")
        yield "the cable is out (cut both ways)"
        self.lab.cable(host, "up")

    def pair_cut(self, host: str) -> Iterator[str]:
        other = self.another(host)
        self.lab.cut(host, other)
        self.lab.cut(other, host)
        yield "two of three cut from each other"
        self.lab.mend(host, other)

    def flaps(self, host: str) -> Iterator[str]:
        for dummy in range(FLAPS):
            self.lab.cable(host, "down")
            time.sleep(self.chance.uniform(0, FLAP_SECONDS))
            self.lab.cable(host, "up")
            time.sleep(self.chance.uniform(0, FLAP_SECONDS))
        yield "the link flaps"

    def slow(self, host: str) -> Iterator[str]:
        limit = ["rate", "1mbit", "burst", "64kb", "latency", "400ms"]
        self.lab.on(host, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield "a link of 1 Mbit/s"
        self.lab.on(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def full_disk(self, host: str) -> Iterator[str]:
        filler = self.fill(host)
        yield "the disk is full"
        filler.unlink(missing_ok=True)

    def fill(self, host: str) -> Path:
        filler = self.lab.folder / host / "filler"
        self.lab.on(host, "dd", "if=/dev/zero", f"of={filler}", "bs=512")
        return filler

    def spoilt(self, host: str) -> Iterator[str]:
        newest = sorted((self.lab.folder / host).glob("base_checkpoints/*/model_*.pt"))[-1:]
        how = self.spoil(newest[0]) if newest else "there is none"
        self.lab.send(signal.SIGKILL, self.lab.rank(host))
        yield f"the newest checkpoint is spoilt ({how}), SIGKILL of the rank"

    def spoil(self, path: Path) -> str:
        with path.open("r+b") as file:
            if self.chance.random() < 0.5:
                file.truncate(SPOILT_AT)
                return "cut off"
            file.seek(SPOILT_AT)
            byte = file.read(1)
            file.seek(SPOILT_AT)
            file.write(bytes([byte[0] ^ 255]))
            return "flipped"

    def stopped_by_user(self, host: str) -> Iterator[str]:
        """A user stops the run on all hosts."""
        self.lab.stop()
        yield STOPPED
        self.lab.launch()

    def stopped_on_a_full_disk(self, host: str) -> Iterator[str]:
        filler = self.fill(host)
        self.lab.stop()
        yield f"{STOPPED}, on a full disk"
        filler.unlink(missing_ok=True)
        self.lab.launch()

    def cannot_start(self, host: str) -> Iterator[str]:
        """Its Python ends at once; where it gives up meanwhile, a user lets it in again."""
        lab, broken = self.lab, self.lab.broken(host)
        broken.write_text(BROKEN)
        kept = (lab.sessions[host].pid, lab.keeper(host))
        lab.send(signal.SIGKILL, *(pid for pid in lab.processes(host) if pid not in kept))
        yield "no rank can start"
        broken.unlink()

        def is_decided() -> bool:
            return lab.sessions[host].poll() is not None or lab.read(host, "members.json").get("state") == "training"

        lab.wait(f"{host} to train or to give up", is_decided)
        if lab.sessions[host].poll() is not None:
            lab.boot(host)

    def says_nonsense(self, host: str) -> Iterator[str]:
        self.lab.power(host, on=False)
        self.lab.cable(host, "up")
        liar = self.lab.beside(host, LIAR)
        yield "a keeper says nonsense"
        liar.kill()
        liar.wait()
        self.lab.power(host, on=True)
