# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The three containers of the scenarios membership and evening: changes to them, and the files of their run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))

from ansible_collections.nanochat.ddp.tests.integration.lan import json_of

SCENARIO = os.environ.get("MOLECULE_SCENARIO_NAME", "membership")
SUBNET = {"membership": "10.89.78", "evening": "10.89.85"}[SCENARIO]
HOSTS = {"desktop": "lzw", "laptop": "xiaoxin", "attic": "lzw"}
ADDRESS = {host: f"{SUBNET}.{number}" for number, host in enumerate(HOSTS, 11)}
RUN = "d2"
PATIENCE = 300


def name(host: str) -> str:
    """The container of a host."""
    return f"ddp-{SCENARIO}-{host}"


def on(host: str, script: str, check: bool = True) -> str:
    """A shell script as root on a host, past ssh and whatever fault is on the network."""
    argv = ["podman", "exec", "-i", "--user", "root", name(host), "sh", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not check, f"{host}: {script}: {done.stdout}{done.stderr}"
    return done.stdout


def podman(*argv: str) -> None:
    # In a container on cgroup v1, systemd may notice only after 90 s that a user's processes have ended.
    done = subprocess.run(["podman", *argv], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"podman {' '.join(argv)}: {done.stderr}"


def until(what: str, true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until something is true; returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def cut(host: str, *sources: str) -> None:
    """From now on a host gets nothing from the others; what it sends still arrives there."""
    rules = " ".join(f"ip saddr {ADDRESS[source]} drop;" for source in sources)
    on(host, f"nft 'table inet cut {{ chain i {{ type filter hook input priority -10; {rules} }}; }}'")


def mend(host: str) -> None:
    on(host, "nft delete table inet cut")


def boot(host: str) -> None:
    """Switch a host on, and wait until it can be reached over ssh: it comes back with another MAC address."""
    podman("start", name(host))

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS[host], 22), 2):
            return True
        return False

    until(f"{host} to be reached over ssh", answers, PATIENCE)


def shut_down(host: str) -> None:
    """Shut a host down as its owner does: systemd ends all that runs, in its order, and then itself."""
    # It is gone before the command has an answer.
    on(host, "systemctl poweroff", check=False)
    podman("wait", name(host))


def prepare(host: str) -> None:
    """Act as the owner: /opt is open to the trainer, and the attic's systemd serves root only, so that its keeper starts by crontab."""
    on(host, "chmod 1777 /opt")
    if host == "attic":
        on(host, "systemctl mask user@.service")


class Played:
    """A playbook's exit code and output."""

    def __init__(self, code: int, output: str) -> None:
        self.code, self.output = code, output

    def document(self) -> dict[str, Any]:
        """The JSON document that it printed."""
        return json_of(self.output)


class Trio:
    """The inventory of the scenario, a folder for results, and the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table: list[dict[str, Any]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
        self.env |= {
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"),
            "ANSIBLE_SSH_ARGS": f"-F {os.environ['TEST_SSH_CONFIG']} -o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_FORKS": "8",
            "ANSIBLE_STDOUT_CALLBACK": "default",
            "ANSIBLE_INTERPRETER_PYTHON": "auto_silent",
            "NO_COLOR": "1",
        }

    def argv(self, playbook: str, *words: str, **settings: Any) -> list[str]:
        given = json.dumps({"ddp_results_dir": str(self.folder), **settings})
        return ["ansible-playbook", playbook, "-i", str(HERE.parent / SCENARIO / "inventory"), "-e", given, *words]

    def play(self, playbook: str, *words: str, **settings: Any) -> Played:
        """A playbook to its end."""
        done = subprocess.run(
            self.argv(playbook, *words, **settings),
            env=self.env, cwd=self.folder, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        return Played(done.returncode, done.stdout + done.stderr)

    def played(self, playbook: str, *words: str, **settings: Any) -> str:
        """The output of a playbook, which must succeed."""
        done = self.play(playbook, *words, **settings)
        assert done.code == 0, done.output
        return done.output

    def folder_of(self, host: str, run: str = RUN) -> str:
        return f"/home/{HOSTS[host]}/nanochat/runs/{run}"

    def read(self, host: str, file: str, run: str = RUN) -> str:
        return on(host, f"cat {self.folder_of(host, run)}/{file} 2>/dev/null", check=False)

    def events(self, host: str, kind: str, run: str = RUN) -> list[dict[str, Any]]:
        """Of the rank's metrics."""
        return [event for event in map(json.loads, self.metrics(host, run)) if event["kind"] == kind]

    def metrics(self, host: str, run: str = RUN) -> list[str]:
        rank = list(HOSTS).index(host)
        return self.read(host, f"metrics-rank{rank}.jsonl", run).split("\n")[:-1]

    def members(self, host: str) -> tuple[str | None, list[str]]:
        told = json.loads(self.read(host, "members.json") or "{}")
        return told.get("state"), told.get("members", [])

    def keeper_started(self, host: str) -> float:
        """When the newest keeper of a host began; 0 if none has."""
        events = map(json.loads, self.read(host, "members.jsonl").split("\n")[:-1])
        return max((event["time"] for event in events if event["what"] == "keeper started"), default=0.0)

    def pid(self, host: str, run: str = RUN) -> int:
        rank = list(HOSTS).index(host)
        return int(json.loads(self.read(host, f"heartbeat-rank{rank}.json", run))["pid"])

    def wait_for(self, *members: str, run: str = RUN) -> None:
        """Until these train together and have made steps."""

        def together() -> bool:
            return all(self.members(host) == ("training", list(members)) for host in members)

        until(f"{members} to train; {[self.members(host) for host in members]}", together, PATIENCE)
        since = time.time()
        until(f"a step of {members}", lambda: self.events(members[0], "step", run)[-1]["time"] > since, PATIENCE)
        assert together(), [self.members(host) for host in members]

    def wait_for_step(self, run: str, step: int) -> None:
        def made() -> bool:
            events = self.events("desktop", "step", run)
            return bool(events) and events[-1]["step"] >= step

        until(f"step {step} of {run}", made, 2 * PATIENCE)

    def happen(self, what: str, do: Callable[[], object], *members: str, witness: str = "desktop") -> None:
        """Do something, wait until these train together, and note what it cost."""
        begun = time.time()
        do()
        self.wait_for(*members)
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
