# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cost of many hosts to the controller: seconds, CPU time, and modules run on hosts.

    python bench/hosts.py 2 8                # a first run, the same again, plan, --tags restart, status, reset
    python bench/hosts.py 32 --look          # plan, preflight and status only, which start nothing

Hosts are nodes on this machine (ansible_connection: local), so this machine's cores also run all hosts' modules; real hosts are faster.
CPU seconds are those of ansible-playbook with all modules, without the training; a separate column has the part of the hosts' Python,
which real hosts would run themselves. Needs ansible-playbook on the PATH and the trainer's environment made by ./demo.sh (or --venv).
Everything else is in a temporary folder, removed at the end. ANSIBLE_CALLBACKS_ENABLED=ansible.posix.profile_tasks shows each task.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("NANOCHAT_DDP_HOME") or Path.home() / ".cache" / "nanochat-ddp")
# A very small model, because only the controller is measured.
SETTINGS = {
    "ansible_connection": "local",
    "ddp_depth": 2,
    "ddp_aspect_ratio": 16,
    "ddp_head_dim": 32,
    "ddp_sequence": 64,
    "ddp_device_batch": 2,
    "ddp_vocab_size": 512,
    "ddp_eval_every": -1,
    "ddp_threads": 1,
}
RESTART = ["train.yml", "--tags", "restart", "-e", "watch=false", "-e", "ddp_iterations=1000000"]
HEADS = ("hosts", "what", "seconds", "CPU s", "of them on hosts", "modules on hosts", "verbs without a module")
# Replaces the hosts' Python, to log every module and every verb (plugin_utils/_agent/carrier.py) with its CPU time: `times` prints
# user and system time of the shell, then of its children.
INTERPRETER = """#!/bin/sh
if [ "$*" = "-I -S -" ]; then what=verb; else what=module; fi
{python} "$@"
code=$?
{{ echo $what; times; }} >>{counts}
exit $code
"""


def seconds_of(word: str) -> float:
    """Parse the shell's 1m2.34s."""
    minutes, seconds = word.rstrip("s").split("m")
    return 60 * int(minutes) + float(seconds)


class Bench:
    """Some nodes on this machine in a temporary folder."""

    def __init__(self, folder: Path, hosts: int, venv: Path) -> None:
        self.folder, self.hosts, self.started = folder, hosts, folder / "started"
        interpreter = folder / "python"
        interpreter.write_text(INTERPRETER.format(counts=self.started, python=sys.executable), encoding="ascii")
        interpreter.chmod(0o755)
        settings = {
            **SETTINGS,
            "ansible_python_interpreter": str(interpreter),
            "ddp_base_dir": f"{folder}/{{{{ inventory_hostname }}}}",
            "ddp_results_dir": f"{folder}/results",
            "ddp_venv_dir": str(venv),
            "ddp_total_batch": 128 * hosts,
            "ddp_eval_tokens": 128 * hosts,
        }
        names = {f"node{number:03}": {} for number in range(1, hosts + 1)}
        inventory = {"trainers": {"hosts": names, "vars": settings}}
        (folder / "hosts.json").write_text(json.dumps(inventory), encoding="utf-8")

    def play(self, what: str, words: Sequence[str], may_fail: bool = False) -> None:
        """Run a playbook and print its cost."""
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FORKS": str(max(32, self.hosts)),
            "NO_COLOR": "1",
        }
        log = self.folder / "log"
        self.started.write_bytes(b"")
        begin = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["ansible-playbook", "-i", str(self.folder / "hosts.json"), *words],
                cwd=ROOT, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            dummy, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and not may_fail:
            raise SystemExit(f"{' '.join(words)} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        started = self.started.read_text(encoding="ascii").split()
        times = (seconds, used.ru_utime + used.ru_stime, sum(seconds_of(word) for word in started if word[0].isdigit()))
        cells = [
            str(self.hosts),
            what,
            *(f"{one:.1f}" for one in times),
            *(str(started.count(one)) for one in ("module", "verb")),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)

    def look(self) -> None:
        """Playbooks that start nothing; before a set-up, preflight reports that the trainer is missing."""
        self.play("plan", ["nanochat.ddp.plan"])
        self.play("preflight", ["nanochat.ddp.preflight"], may_fail=True)
        self.play("status", ["nanochat.ddp.status"])

    def whole(self) -> None:
        """A whole job and its usual commands."""
        self.play("from empty hosts to the end of a run", ["train.yml"])
        self.play("the same again", ["train.yml"])
        if "changed: nothing" not in (self.folder / "log").read_text(encoding="utf-8"):
            raise SystemExit(f"The second run changed something; see {self.folder / 'log'}")
        self.play("plan", ["nanochat.ddp.plan"])
        try:
            self.play("launch", RESTART)
            self.play("--tags restart of a run in progress", RESTART)
            self.play("status", ["nanochat.ddp.status"])
        finally:
            # Stop everything, whatever happened.
            self.play("reset", ["nanochat.ddp.reset"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("hosts", nargs="+", type=int)
    parser.add_argument("--look", action="store_true", help="plan, preflight and status only")
    parser.add_argument("--venv", type=Path, default=HOME / "trainer-venv", help="the trainer's environment")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores for all hosts and the controller; load before: {os.getloadavg()[0]:.1f}")
    print(f"| {' | '.join(HEADS)} |\n|" + "---|" * len(HEADS), flush=True)
    for hosts in given.hosts:
        with tempfile.TemporaryDirectory(prefix="ddp-hosts-") as name:
            bench = Bench(Path(name), hosts, given.venv)
            bench.look() if given.look else bench.whole()


if __name__ == "__main__":
    main()
