# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cost of observing a run: the journal that the trainer keeps, and the looks at it from the controller.

    python bench/display.py                        # about four minutes; ansible-playbook must be on the PATH
    python bench/display.py --venv ~/.cache/nanochat-ddp/trainer-venv --blocks 12 --write display.json

Two nodes on this machine, reached through an sshd of its own on the loopback, train the trial model. Processor time
is what counts: that of the journal is measured in a process that does nothing else, that of a look is what the sshd
and all that it started have used. By the clock, blocks with watching, with watching and a status every few seconds,
and with neither take turns in one and the same run; the controller, which is usually another machine, gives way to
everything else there. Needs root, openssh-server and tmux; ends and removes what it made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pieces import free_port

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("NANOCHAT_DDP_HOME") or Path.home() / ".cache" / "nanochat-ddp")
TICKS = os.sysconf("SC_CLK_TCK")
STATUS_SECONDS = 5.0
SETTLE = 8.0  # a block's first seconds belong to the start of the controller's program
LOOKS = 30
WAITED = 20.0
LENGTHS = (60.0, 600.0, 3600.0, 36000.0)
JOURNAL = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from nanochat.record import prometheus
from nanochat.record.metrics import Heartbeat, Metrics, memory_bytes
folder, steps = Path(sys.argv[1]), 4000
metrics = Metrics(folder / "metrics-rank0.jsonl")
file = prometheus.Textfile(folder, "d4", 0)
metrics.listeners.append(file.take)
beat = Heartbeat(folder / "heartbeat-rank0.json", 0, 2, every=3600.0)
values = json.loads(sys.argv[2])
def cost(count, act):
    begun = time.process_time()
    for number in range(count):
        act(number)
    return (time.process_time() - begun) / count
def step(number):
    metrics.write("step", number, **{**values, "memory_bytes": memory_bytes()})
def phases(number):
    for phase in ("data", "forward_backward", "sync", "optimizer") * 2:
        beat.enter(phase, number)
print(json.dumps({"step": cost(steps, step), "phases": cost(steps, phases), "beat": cost(400, lambda number: beat._write()),
                  "textfile": cost(400, lambda number: file.write())}))
os._exit(0)
"""


# -- the job


class Job:
    """Two nodes behind an sshd, in a folder of their own."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder, self.venv = folder, venv
        self.ports = [free_port() for dummy in range(2)]
        self.sshd = self._start_sshd()
        hosts = {f"node{number + 1}": {} for number in range(2)}
        reached = {"ansible_host": "127.0.0.1", "ansible_port": self.ports[0], "ansible_ssh_private_key_file": str(folder / "user"),
                   "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
                   "ansible_python_interpreter": sys.executable, "ddp_venv_dir": str(venv), "ddp_port": self.ports[1], "ddp_run": "display",
                   "ddp_address": "127.0.0.1", "ddp_threads": 1, "ddp_iterations": 100000, "ddp_save_every": -1, "ddp_eval_every": -1,
                   "ddp_base_dir": str(folder / "{{ inventory_hostname }}"), "ddp_watch": False, "ddp_results_dir": str(folder / "results"),
                   "ddp_extra_env": {"NANOCHAT_PROM_DIR": str(folder)}}  # fmt: skip
        (folder / "hosts.json").write_text(json.dumps({"trainers": {"hosts": hosts, "vars": reached}}))
        (folder / "cp").mkdir()

    def _start_sshd(self) -> int:
        for key in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)
        settings = {"HostKey": self.folder / "host", "AuthorizedKeysFile": self.folder / "user.pub", "StrictModes": "no", "PidFile": "none",
                    "UsePAM": "no", "PermitRootLogin": "yes", "ListenAddress": "127.0.0.1",
                    # A home of its own: what this user's shell does at its start is no part of the look.
                    "SetEnv": f"TMUX_TMPDIR={self.folder} HOME={self.folder}"}  # fmt: skip
        argv = [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-f", "/dev/null", "-p", str(self.ports[0])]
        argv += [f"-o{name}={value}" for name, value in settings.items()]
        return subprocess.Popen(argv).pid

    def playing(self, book: str, *words: str) -> subprocess.Popen[str]:
        """A playbook at work."""
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "cp"),
        }
        argv = ["nice", "-n", "19", "ansible-playbook", "-i", str(self.folder / "hosts.json"), book, *words]
        return subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def play(self, book: str, *words: str) -> str:
        """A playbook to its end."""
        done = self.playing(book, *words)
        told = done.communicate()[0]
        if done.returncode:
            raise SystemExit(f"{book} failed:\n{told}")
        return told

    def write_play(self, name: str, tasks: dict[str, Any]) -> str:
        """A playbook of one play."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps([{"hosts": "trainers", "gather_facts": False, **tasks}]))
        return str(path)

    def steps(self) -> list[dict[str, Any]]:
        """Rank 0's steps so far."""
        lines = (self.folder / "node1/runs/display/metrics-rank0.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "step"]

    def used(self) -> float:
        """Processor seconds of the sshd and of all that it started; the trainer is tmux's child and not among them."""
        return tree_seconds(self.sshd)


def end(process: subprocess.Popen[str]) -> None:
    """End a playbook with its workers, which have sessions of their own and would go on without it."""
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def run(*argv: str, **more: Any) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:3])} ... failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def tree_seconds(pid: int) -> float:
    """Processor seconds of a process, its children and those that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(tree_seconds(int(child)) for child in children)


@contextlib.contextmanager
def training(venv: Path) -> Iterator[Job]:
    """Poll a running training often enough."""
    folder = Path(tempfile.mkdtemp(prefix="nanochat-display-"))
    job = Job(folder, venv)
    try:
        job.play("train.yml")
        yield job
    finally:
        with contextlib.suppress(SystemExit):
            job.play("train.yml", "--tags", "stop")
        subprocess.run(
            ["tmux", "kill-server"], env={**os.environ, "TMUX_TMPDIR": str(folder)}, capture_output=True, check=False
        )
        os.kill(job.sshd, signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


# -- what is measured


def journal(job: Job) -> dict[str, float]:
    """Processor seconds of one step's event, of one beat, of one text file, of one step's phases."""
    values = {key: value for key, value in job.steps()[-1].items() if key not in ("kind", "time", "step")}
    folder = job.folder / "journal"
    folder.mkdir()
    python = str(job.venv / "bin" / "python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "trainer")}
    found: dict[str, float] = json.loads(run(python, "-c", JOURNAL, str(folder), json.dumps(values), env=environment))
    return found


def looks(job: Job) -> dict[str, float]:
    """Processor seconds on the hosts of one look, of a second of waiting for news, of one status."""
    look = {"base_dir": "{{ ddp_base_dir }}", "run": "display", "lines": 5}
    many = job.write_play("looks", {"tasks": [{"nanochat.ddp.run_info": look, "loop": list(range(LOOKS))}]})
    # Nobody ever makes the step before the first one, so there is no news before time is up.
    waiting = {**look, "wait": {"state": "running", "step": -1, "at_least": WAITED, "timeout": WAITED}}
    patient = job.write_play("waiting", {"tasks": [{"nanochat.ddp.run_info": waiting}]})
    job.play(many)  # connects
    found = {}
    for name, book, count in (("look", many, 2 * LOOKS), ("waiting", patient, 2), ("status", "nanochat.ddp.status", 2)):
        before, own, begun = job.used(), os.times(), time.monotonic()
        job.play(book)
        took, now = time.monotonic() - begun, os.times()
        found[name] = (job.used() - before) / count
    # The last one was the status.
    found["status took"] = took
    found["status controller"] = now.children_user + now.children_system - own.children_user - own.children_system
    found["peek"] = max(0.0, found.pop("waiting") - found["look"]) / WAITED
    return found


def by_the_clock(job: Job, blocks: int, seconds: float) -> dict[str, Any]:
    """Seconds of a step in blocks with and without watching, in turn; a status comes every few seconds on top in every third block."""
    plan = json.loads((job.folder / "node1/runs/display/plan.json").read_text(encoding="utf-8"))
    role = {
        "role": "nanochat.ddp.watch",
        "watch_plan": plan,
        "watch_to_end": True,
        "watch_stall_factor": 5.0,
    }
    book = job.write_play("watch", {"roles": [role]})
    kinds = ["nothing", "watch", "watch and status"]
    spans: list[tuple[str, float, float]] = []
    for number in range(blocks * len(kinds)):
        kind = kinds[number % len(kinds)]
        watcher = job.playing(book) if kind != "nothing" else None
        begun = time.time()
        while time.time() - begun < seconds:
            if kind == "watch and status":
                job.play("nanochat.ddp.status")
            time.sleep(max(0.0, min(STATUS_SECONDS, begun + seconds - time.time())))
        spans.append((kind, begun, time.time()))
        if watcher:
            end(watcher)
    steps = job.steps()
    found: dict[str, list[list[float]]] = {}
    for kind, begun, ended in spans:
        # Whole steps of this block.
        made = [
            step["seconds"]
            for step in steps
            if begun + SETTLE < step["time"] - step["seconds"] and step["time"] < ended
        ]
        found.setdefault(kind, []).append(made)
    usual = statistics.median(chain.from_iterable(found["nothing"]))
    return {kind: told_of(parts, usual) for kind, parts in found.items()}


def told_of(parts: list[list[float]], usual: float) -> dict[str, Any]:
    """A kind of blocks against the usual step; how far its own blocks lie apart says how much of that is noise."""
    middle, medians = statistics.median(chain.from_iterable(parts)), [statistics.median(part) for part in parts if part]
    apart = max(medians) / min(medians) - 1
    return {"steps": sum(map(len, parts)), "median": middle, "against nothing": middle / usual, "blocks apart": apart}


def looks_of(length: float) -> float:
    """How many looks a run of so many seconds is worth."""
    from ansible_collections.nanochat.ddp.plugins.module_utils._run.watching import intervals

    count, at = 1, 0.0
    while at < length:
        at += intervals(at)["at_least"]
        count += 1
    return count


def tell(found: dict[str, Any], cores: int) -> None:
    """The figures as the documentation has them."""
    kept, seen = found["journal"], found["looks"]
    each_step = kept["step"] + kept["phases"]
    each_second = kept["beat"] + kept["textfile"]
    print(f"load {found['load']:.0f} on {cores} cores")
    print(f"journal: {1e6 * each_step:.0f} us a step and {1e6 * each_second:.0f} us a second;", end=" ")
    share = each_second + each_step / found["step_seconds"]
    print(f"with steps of {found['step_seconds']:.2f} s that is {100 * share:.3f} % of one core")
    print(f"look: {1e3 * seen['look']:.0f} ms; status: {1e3 * seen['status']:.0f} ms a host;", end=" ")
    print(f"waiting for news: {1e3 * seen['peek']:.2f} ms a second")
    by_clock, processor = seen["status took"], seen["status controller"]
    print(f"a status of both hosts took {by_clock:.1f} s by the clock, {processor:.1f} s of the controller's processor")
    for length in LENGTHS:
        used = looks_of(length) * seen["look"] + length * seen["peek"]
        print(
            f"watching {length:6.0f} s: {used:.1f} s of the host, {100 * used / length / cores:.2f} % of {cores} cores"
        )
    for kind, told in found["clock"].items():
        print(
            f"{kind:<17} {told['steps']:4d} steps, median {told['median']:.3f} s, {100 * (told['against nothing'] - 1):+.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what seeing a run costs it.")
    parser.add_argument(
        "--venv", type=Path, default=CACHE / "trainer-venv", help="the trainer's Python; made if it is not there"
    )
    parser.add_argument("--blocks", type=int, default=3, help="rounds of a block of each kind")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a block")
    parser.add_argument("--write", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if os.geteuid() or not shutil.which("tmux"):
        raise SystemExit("This needs root (for an sshd of its own) and tmux.")
    sys.path.insert(0, str(ROOT / ".ansible" / "collections"))
    cores = len(os.sched_getaffinity(0))
    with training(arguments.venv) as job:
        found: dict[str, Any] = {"journal": journal(job), "looks": looks(job)}
        found["clock"] = by_the_clock(job, arguments.blocks, arguments.seconds)
        found["step_seconds"] = statistics.median(step["seconds"] for step in job.steps()[1:])
    found["load"] = os.getloadavg()[0]
    tell(found, cores)
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
