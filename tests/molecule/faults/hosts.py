# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two containers of this scenario, the playbooks that are run against them, and the runs on which faults are made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import signed
from ansible_collections.nanochat.ddp.tests.integration.lan import json_of

SCENARIO = os.environ.get("MOLECULE_SCENARIO_NAME", "faults")
USER = {"desktop": "lzw", "laptop": "xiaoxin"}
BASE = {"desktop": "/home/lzw/nanochat", "laptop": "/home/xiaoxin/projects/nanochat"}
ADDRESS = {"desktop": "10.89.75.11", "laptop": "10.89.75.12"}
RUN = "d2"


def name(host: str) -> str:
    """The container of a host."""
    return f"ddp-{SCENARIO}-{host}"


def on(host: str, script: str, user: str = "root", check: bool = True) -> str:
    """A shell script on a host, past ssh and whatever fault is on the network."""
    argv = ["podman", "exec", "-i", "--user", user, name(host), "sh", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not check, f"{host}: {script}: {done.stdout}{done.stderr}"
    return done.stdout


def podman(*argv: str) -> None:
    # In a container on cgroup v1, systemd may notice only after 90 s that a user's processes have ended.
    done = subprocess.run(["podman", *argv], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"podman {' '.join(argv)}: {done.stderr}"


def limit_cores(host: str, cores: float) -> None:
    """Limit the CPU of the host's processes; 0 for all. A limit cannot be removed later, only raised."""
    podman("update", "--cpus", str(cores or os.cpu_count()), name(host))


def until(what: str, true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until something is true; returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = true()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def set_flag(plan: dict[str, Any], flag: str, value: int) -> None:
    """Change what a plan passes to every rank."""
    for node in plan["nodes"]:
        node["argv"] = [f"--{flag}={value}" if word.startswith(f"--{flag}=") else word for word in node["argv"]]


class Played:
    """A playbook's output, and the time it took."""

    def __init__(self, code: int, output: str, seconds: float) -> None:
        self.code, self.output, self.seconds = code, output, seconds

    def document(self) -> dict[str, Any]:
        """The JSON document that it printed."""
        return json_of(self.output)


class Lab:
    """The inventory of the scenario and a folder for results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = os.environ["TEST_SSH_CONFIG"]
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
        self.env |= {
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible" / "collections"),
            "ANSIBLE_SSH_ARGS": f"-F {config} -o ControlMaster=auto -o ControlPersist=60s",
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
        begun = time.monotonic()
        done = subprocess.run(
            self.argv(playbook, *words, **settings),
            env=self.env, cwd=self.folder, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        return Played(done.returncode, done.stdout + done.stderr, time.monotonic() - begun)

    def preflight(self, *words: str, **settings: Any) -> tuple[dict[str, dict[str, Any]], Played]:
        """The findings by code, and the playbook's output."""
        settings = {"ddp_json": True, "preflight_measure_seconds": 0, **settings}
        played = self.play("nanochat.ddp.preflight", *words, **settings)
        findings = played.document()["findings"]
        return {f"{one['code']} {one['host']}": one for one in findings} | {
            one["code"]: one for one in findings
        }, played

    def plan(self, *words: str, **settings: Any) -> tuple[dict[str, Any], Played]:
        """The document {plan, findings}."""
        path = self.folder / "plan.json"
        path.unlink(missing_ok=True)
        played = self.play("nanochat.ddp.plan", *words, ddp_plan_file=str(path), **settings)
        return (json.loads(path.read_text()) if path.exists() else {}), played


class Training:
    """A run that is being watched, and the fault that is made in it."""

    def __init__(
        self, lab: Lab, plan: dict[str, Any], fresh: bool = True, start: tuple[str, ...] = tuple(USER)
    ) -> None:
        self.lab, self.plan = lab, signed(plan)
        path = lab.folder / "plan-now.json"
        path.write_text(json.dumps(self.plan))
        self.log = lab.folder / "run.log"
        self.verdict_file = lab.folder / plan["run"] / "doctor.json"
        self.verdict_file.unlink(missing_ok=True)
        self.fault_at, self.began = time.monotonic(), time.time()
        settings = {"faults_plan": str(path), "faults_fresh": fresh, "faults_start": list(start)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                lab.argv(str(HERE / "run.yml"), **settings), env=lab.env, cwd=lab.folder, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def node(self, host: str) -> dict[str, Any]:
        return next(dict(node) for node in self.plan["nodes"] if node["host"] == host)

    def read(self, host: str, name: str) -> str:
        """A file of the run folder."""
        return on(host, f"cat {self.node(host)['run_dir']}/{name} 2>/dev/null", check=False)

    def heartbeat(self, host: str) -> dict[str, Any]:
        text = self.read(host, f"heartbeat-rank{self.node(host)['rank']}.json")
        return dict(json.loads(text)) if text else {}

    def started(self, host: str) -> float:
        """When the rank of a host was started this time; 0 while it was not."""
        began = float(json.loads(self.read(host, "session.json") or "{}").get("started", 0.0))
        return began if began > self.began else 0.0

    def reach(self, step: int, host: str = "laptop") -> int:
        """Wait for a step; returns the pid of the host's rank."""

        def there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            beat, begun = self.heartbeat(host), self.started(host)
            return bool(begun and beat.get("time", 0.0) > begun and beat["step"] >= step and beat["phase"] != "end")

        until(f"step {step} on {host}", there, 240)
        return int(self.heartbeat(host)["pid"])

    def fault(self) -> None:
        """Count the seconds until the verdict from now on."""
        self.fault_at = time.monotonic()

    def verdict(self, seconds: float = 120.0) -> tuple[dict[str, Any], float]:
        """The doctor's verdict when watch called it, and the seconds since the fault."""

        def there() -> bool:
            return self.verdict_file.exists() and self.verdict_file.stat().st_size > 0

        until(f"a verdict; {self.log}", lambda: there() or self.process.poll() is not None, seconds)
        took = time.monotonic() - self.fault_at
        assert there(), self.log.read_text()
        time.sleep(0.2)
        return dict(json.loads(self.verdict_file.read_text())["verdict"]), took

    def leave(self) -> None:
        """The watching ends, as with a controller that is switched off; the run goes on."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """The watching ends, and then the run."""
        self.leave()
        for host in USER:
            on(host, "for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' <$f 2>/dev/null | grep -q ^NANOCHAT_DDP_SESSION= && "
               "kill -KILL $(echo $f | cut -d/ -f3); done; true", check=False)  # fmt: skip
