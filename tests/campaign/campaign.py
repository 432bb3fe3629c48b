# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rounds of random faults at random moments of random playbooks, and whether a user comes out of each as the product promises.

Two hosts train one small model again and again. A round plays a playbook, makes one fault at a random moment, takes it back, and then
does what the messages advise: `train.yml` once more, then `--tags restart`. A round fails where

  - a playbook does not end within its limit, or shows a Python traceback,
  - a playbook fails without saying what was seen,
  - the run does not go on after three tries.

Whenever the run has come to its last step, weights and optimizer on both hosts must be those of a run that nobody disturbed, to the bit.
In the end `reset` must leave the hosts with the firewall rules and processes that they had before. Exit code 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS, Scene
from hosts import BASE, NAMES, VENV, HostError, Hosts, on

ROOT = Path(__file__).resolve().parents[2]
SSH_ARGS = "-o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=5 -o ServerAliveCountMax=4"
TOLD = re.compile(
    r"(ERROR|error|WARNING|fatal|Failed|failed|\[ERROR\]|do:|why:)|.*(cannot|crashed|stalled|timed out|unreachable|Ctrl-C)"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RUN, WHOLE = "campaign", "whole"
STEPS = 300
PLAY_SECONDS = 420.0
TRIES = 3
SETTINGS: dict[str, Any] = {
    "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 128, "ddp_total_batch": 1024, "ddp_device_batch": 4,
    "ddp_vocab_size": 1024, "ddp_iterations": STEPS, "ddp_save_every": 20, "ddp_eval_every": 50, "ddp_eval_tokens": 1024,
    "ddp_threads": 1, "ddp_timeout": 40, "ddp_venv_dir": VENV, "ddp_sync": "exact", "ddp_batch_split": "equal",
}  # fmt: skip
# What a user types, the more often the more often he does.
PLAYS = (
    ["train"], ["train"], ["train"], ["train", "-e", "watch=false"], ["train", "--tags", "restart"],
    ["train", "--tags", "restart", "-e", "watch=false"],
    ["status"], ["doctor"], ["stop"], ["collect"], ["preflight"], ["reset"],
)  # fmt: skip
ADVISED = (["train"], ["train", "--tags", "restart"], ["train", "--tags", "restart"])


class Broken(Exception):
    """What the product promises did not hold."""


class Play:
    """One playbook that runs, in a process group of its own."""

    def __init__(self, words: list[str], inventory: Path, results: Path) -> None:
        self.words, self.inventory, self.results = words, inventory, results
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
        env |= {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NO_COLOR": "1", "LC_ALL": "C.UTF-8",
            "ANSIBLE_SSH_ARGS": f"-F {os.environ['TEST_SSH_CONFIG']} {SSH_ARGS}",
        }  # fmt: skip
        argv = ["ansible-playbook", f"nanochat.ddp.{words[0]}", "-i", str(inventory), *words[1:]]
        self.begun = time.monotonic()
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (read when it has ended)
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output, start_new_session=True
        )  # fmt: skip

    def again(self) -> Play:
        return Play(self.words, self.inventory, self.results)

    def finish(self) -> tuple[int, str]:
        """Its exit code and what it printed; Broken where it does not end or prints what nobody should see."""
        try:
            code = self.process.wait(max(1.0, PLAY_SECONDS - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise Broken(f"{self} did not end within {PLAY_SECONDS:.0f} s: {self.said()[-1500:]}") from None
        said = self.said()
        if "Traceback (most recent call last)" in said:
            raise Broken(f"{self} showed a traceback: {said[-3000:]}")
        if code not in (0, 99, -2, 130) and not message_of(said):
            raise Broken(f"{self} ended with {code} and no message: {said[-1500:]}")
        return code, said

    def said(self) -> str:
        self.output.seek(0)
        return ANSI.sub("", self.output.read()).replace("\r", "\n")

    def __str__(self) -> str:
        return f"nanochat.ddp.{' '.join(self.words)}"


def message_of(said: str) -> str:
    """The lines that say what went wrong, as one."""
    lines = [line.strip() for line in said.splitlines()]
    told = [line for line in lines if TOLD.match(line)]
    return " / ".join(dict.fromkeys(told))[:600]


class Round(NamedTuple):
    """What was done and what came of it."""

    number: int
    playbook: str
    after: float
    fault: str
    what: str
    lasted: float
    code: int
    message: str
    repaired_by: str


class Campaign:
    def __init__(self, hosts: Hosts, seed: int) -> None:
        self.hosts, self.chance = hosts, random.Random(seed)
        self.results = hosts.folder / "results"
        self.whole: dict[str, str] = {}  # by matrix library
        self.finished = 0

    def play(self, words: list[str]) -> tuple[int, str]:
        return Play(words, self.hosts.inventory, self.results).finish()

    def configure(self, run: str, **more: Any) -> None:
        self.hosts.settings({**SETTINGS, "ddp_run": run, "ddp_results_dir": str(self.results), **more})

    # -- the run that nobody disturbs

    def train_undisturbed(self) -> None:
        self.configure(WHOLE)
        code, said = self.play(["train", "-e", "ddp_fresh=true"])
        if code != 0:
            raise Broken(f"the undisturbed run failed: {said[-3000:]}")
        self.whole_digest()
        self.configure(RUN)

    def whole_digest(self) -> None:
        found = {self.hosts.weights(host, WHOLE, STEPS) for host in NAMES}
        # Each host's folder has the optimizer file of each rank, so they are alike.
        if len({route for dummy, route in found}) != 1:
            raise Broken(f"the hosts differ after an undisturbed run: {found}")
        self.whole[next(iter(found))[1]] = "/".join(sorted(digest for digest, dummy in found))

    def compare(self) -> None:
        """The finished run against the undisturbed one of the same matrix library."""
        found = {self.hosts.weights(host, RUN, STEPS) for host in NAMES}
        route = next(iter(found))[1]
        for dummy in range(8):
            if route in self.whole:
                break
            self.train_undisturbed()
        else:
            raise HostError(f"no undisturbed run took the matrix library {route}")
        if "/".join(sorted(digest for digest, dummy in found)) != self.whole[route]:
            raise Broken(f"weights or optimizer differ from the undisturbed run: {found} against {self.whole[route]}")
        self.finished += 1

    # -- one round

    def round(self, number: int) -> Round:
        words = list(self.chance.choice(PLAYS))
        name = self.chance.choice(list(FAULTS))
        after, lasts = self.chance.uniform(0.5, 25.0), self.chance.uniform(2.0, 50.0)
        play = Play(words, self.hosts.inventory, self.results)
        end = time.monotonic() + after
        while time.monotonic() < end and play.process.poll() is None:
            time.sleep(0.1)
        fault = FAULTS[name](Scene(self.hosts, RUN, self.chance, play))
        what = next(fault)
        begun = time.monotonic()
        while time.monotonic() - begun < lasts:
            time.sleep(0.2)
        for dummy in fault:
            pass
        lasted = time.monotonic() - begun
        code, said = play.finish()
        repaired = self.repair()
        return Round(number, str(play), after, name, what, lasted, code, message_of(said) if code else "", repaired)

    def repair(self) -> str:
        """What the messages advise, until the run has come to its end or goes on."""
        said = ""
        for words in ADVISED[:TRIES]:
            code, said = self.play(list(words))
            if code == 0 and self.at_its_end():
                self.compare()
                for host in NAMES:  # what a fresh start sets aside is kept for ever, and these disks are small
                    on(host, f"rm -rf {BASE}/runs/{RUN}/previous*")
                code, said = self.play(["train", "-e", "ddp_fresh=true", "-e", "watch=false"])
                if code != 0:
                    raise Broken(f"a fresh start failed: {said[-3000:]}")
                return " ".join(words)
        raise Broken(f"the run did not come to its end after {TRIES} tries: {said[-3000:]}")

    def at_its_end(self) -> bool:
        code, said = self.play(["status", "-e", "ddp_json=true"])
        try:
            hosts = json.loads(said[said.index("{") : said.rindex("}") + 1])["hosts"]
        except (ValueError, KeyError):
            raise Broken(f"status printed no JSON: {said[-1500:]}") from None
        return code == 0 and all(hosts[host]["state"] == "finished" for host in NAMES)


def report(rounds: list[Round], seed: int, finished: int, broken: str) -> str:
    lines = [
        f"Seed {seed}, {len(rounds)} rounds, {finished} trainings to their last step, each with the weights and the optimizer of the",
        "undisturbed run.",
        "",
        "| round | playbook | fault | lasted | exit code | message | went on by |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rounds:
        message = one.message.replace("|", "\\|") or "-"
        what = f"{one.what}, after {one.after:.0f} s"
        cells = (one.number, one.playbook, what, f"{one.lasted:.0f} s", one.code, message, one.repaired_by)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(
        [
            *lines,
            "",
            broken or "Nothing is left behind: firewall rules and processes of both hosts are those of before.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further round is begun after so many minutes")
    parser.add_argument("--report", type=Path, help="file for the table, in Markdown")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    hosts = Hosts(Path(tempfile.mkdtemp(prefix="nanochat-ddp-campaign-")))
    rounds: list[Round] = []
    campaign, broken, until = Campaign(hosts, seed), "", time.monotonic() + 60 * given.minutes
    try:
        hosts.make()
        before = hosts.rulesets(), hosts.processes()
        campaign.train_undisturbed()
        print(f"seed {seed}: undisturbed run of {STEPS} steps: {campaign.whole}", flush=True)
        for number in range(1, given.rounds + 1):
            if time.monotonic() > until:
                break
            rounds.append(campaign.round(number))
            print(json.dumps(rounds[-1]._asdict()), flush=True)
        code, said = campaign.play(["reset", "-e", "ddp_purge=all"])
        if code != 0:
            raise Broken(f"reset failed: {said[-3000:]}")
        after = hosts.rulesets(), hosts.processes()
        if after != before:
            raise Broken(f"reset left something behind: {before} became {after}")
    except Broken as error:
        broken = f"Broken after round {len(rounds)}: {error}"
        print(broken, file=sys.stderr)
    finally:
        hosts.remove()
        shutil.rmtree(hosts.folder, ignore_errors=True)
    text = report(rounds, seed, campaign.finished, broken)
    if given.report:
        given.report.write_text(text, encoding="utf-8")
    print(text)
    print(f"{len(rounds)} passed, {1 if broken else 0} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
