# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The three hosts of the scenario membership, which their owners freeze, cut off, and switch off and on."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "testinfra"))

from lab import Lab, wait_for

HOSTS = {"desktop": "lzw", "laptop": "xiaoxin", "attic": "lzw"}
SUBNET = "10.89.78"
RUN = "d2"
PATIENCE = 300


def podman(*argv: str) -> None:
    # In a container on cgroup v1, systemd may notice only after 90 s that a user's processes have ended.
    done = subprocess.run(["podman", *argv], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"podman {' '.join(argv)}: {done.stderr}"


class Trio(Lab):
    """Three hosts, changes to them, and the files of their run. settings: further ones of each play."""

    def __init__(self, folder: Path, run: str = RUN, **settings: Any) -> None:
        super().__init__("default")
        self.folder, self.run = folder, run
        self.settings = {"ddp_results_dir": str(folder), "ddp_run": run, **settings}
        self.table: list[dict[str, Any]] = []
        for host in HOSTS:
            self.prepare(host)

    def prepare(self, host: str) -> None:
        """Act as the owner: /opt is open to the trainer."""
        self.on(host, "chmod 1777 /opt")

    def argv(self, playbook: str, *arguments: str, **settings: Any) -> list[str]:
        return super().argv(playbook, *arguments, **{**self.settings, **settings})

    def address(self, host: str) -> str:
        return f"{SUBNET}.{11 + list(HOSTS).index(host)}"

    def cut(self, host: str, *sources: str) -> None:
        """From now on a host gets nothing from the others; what it sends still arrives there."""
        rules = " ".join(f"ip saddr {self.address(source)} drop;" for source in sources)
        self.on(host, f"nft 'table inet cut {{ chain i {{ type filter hook input priority -10; {rules} }}; }}'")

    def repair(self, host: str) -> None:
        self.on(host, "nft delete table inet cut")

    def freeze(self, host: str) -> None:
        podman("pause", self.container(host))

    def wake(self, host: str) -> None:
        podman("unpause", self.container(host))

    def power_off(self, host: str) -> None:
        podman("stop", "-t", "0", self.container(host))

    def boot(self, host: str) -> None:
        """Switch a host on, and wait until it can be reached over ssh: it comes back with another MAC address."""
        podman("start", self.container(host))

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((self.address(host), 22), 2):
                return True
            return False

        wait_for(f"{host} to be reached over ssh", answers, PATIENCE)

    def shut_down(self, host: str) -> None:
        """Shut a host down as its owner does: systemd ends all that runs, in its order, and then itself."""
        # It is gone before the command has an answer.
        self.on(host, "systemctl poweroff", code=None)
        podman("wait", self.container(host))

    def folder_of(self, host: str, run: str = "") -> str:
        return f"/home/{HOSTS[host]}/nanochat/runs/{run or self.run}"

    def read(self, host: str, file: str, run: str = "") -> str:
        return self.on(host, f"cat {self.folder_of(host, run)}/{file} 2>/dev/null", code=None)

    def events(self, host: str, kind: str, run: str = "") -> list[dict[str, Any]]:
        """Of the rank's metrics."""
        return [event for event in map(json.loads, self.metrics(host, run)) if event["kind"] == kind]

    def metrics(self, host: str, run: str = "") -> list[str]:
        rank = list(HOSTS).index(host)
        return self.read(host, f"metrics-rank{rank}.jsonl", run).split("\n")[:-1]

    def members(self, host: str) -> tuple[str | None, list[str]]:
        told = json.loads(self.read(host, "members.json") or "{}")
        return told.get("state"), told.get("members", [])

    def keeper_started(self, host: str) -> float:
        """When the newest keeper of a host began; 0 if none has."""
        events = map(json.loads, self.read(host, "members.jsonl").split("\n")[:-1])
        return max((event["time"] for event in events if event["what"] == "keeper started"), default=0.0)

    def pid(self, host: str) -> int:
        rank = list(HOSTS).index(host)
        return int(json.loads(self.read(host, f"heartbeat-rank{rank}.json"))["pid"])

    def train_together(self, *members: str) -> None:
        """Wait until these train together and have made steps."""

        def together() -> bool:
            return all(self.members(host) == ("training", list(members)) for host in members)

        wait_for(f"{members} to train; {[self.members(host) for host in members]}", together, PATIENCE)
        since = time.time()
        wait_for(f"a step of {members}", lambda: self.events(members[0], "step")[-1]["time"] > since, PATIENCE)
        assert together(), [self.members(host) for host in members]

    def wait_for_step(self, run: str, step: int) -> None:
        def made() -> bool:
            events = self.events("desktop", "step", run)
            return bool(events) and events[-1]["step"] >= step

        wait_for(f"step {step} of {run}", made, 2 * PATIENCE)

    def happen(self, what: str, do: Callable[[], object], *members: str, witness: str = "desktop") -> None:
        """Do something, wait until these train together, and note what it cost."""
        begun = time.time()
        do()
        self.train_together(*members)
        self.note(what, begun, witness)

    def note(self, what: str, begun: float, witness: str) -> None:
        """Seconds from an event to the first step after it in a new generation, and the steps that were lost, as a host saw it."""
        starts = [event for event in self.events(witness, "start") if event["time"] > begun]
        steps = self.events(witness, "step")
        assert starts, f"{witness} did not start again after: {what}"
        first = next(step for step in steps if step["time"] > starts[-1]["time"])
        before = [step["step"] for step in steps if step["time"] < starts[0]["time"]]
        row = {
            "what": what,
            "seconds": round(first["time"] - begun, 1),
            "steps lost": max(0, before[-1] + 1 - starts[-1]["resumed_from"]),
            "of": before[-1] + 1,
        }
        self.table.append(row)
