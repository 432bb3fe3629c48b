# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rounds of random faults at random moments of random playbooks, and whether a user comes out of each as the product promises.

Two hosts train one small model. A round begins with a training that was never started, was stopped on its way, or runs; it plays a
playbook, makes one fault at a random moment, takes it back, and then does what the messages advise until the training has come to its last
step. A round fails where

  - a playbook does not end within its limit, or shows a Python traceback,
  - a playbook fails without a message,
  - the training has not come to its last step after three tries,
  - weights or optimizer of either host differ in a bit from those of the run that nobody disturbed,
  - a process is left that the undisturbed run did not leave.

In the end `reset` must leave the hosts with the firewall rules and processes that they had before. Exit code 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import difflib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

import table
from faults import FAULTS, INSTANT, Scene
from hosts import NAMES, SLOWER, TEXT, VENV, HostError, Hosts, limit_link, until
from plays import INTERRUPTED, PLAY_SECONDS, Broken, Play, advised, messages
from table import Round

RUN = "campaign"
STEPS, STOPPED_AT = 80, 25
SETUP_SECONDS = 1200.0  # the first play makes the data and rehearses
TRIES = 3
SETTINGS: dict[str, Any] = {
    "ddp_run": RUN, "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64, "ddp_total_batch": 512,
    "ddp_device_batch": 4, "ddp_vocab_size": 512, "ddp_iterations": STEPS, "ddp_save_every": 10, "ddp_eval_every": 40,
    "ddp_eval_tokens": 512, "ddp_threads": 1, "ddp_timeout": 45, "ddp_venv_dir": VENV, "ddp_sync": "exact", "ddp_matmul": "fp32",
    "ddp_batch_split": "equal", "ddp_data_paths": [TEXT], "ddp_data_shards": 2,
}  # fmt: skip
NOT_PLAYED = "not played"
NOTHING, STOPPED, RUNNING = "nothing", "stopped", "running"
START = ["train", "--tags", "restart", "-e", "watch=false"]
# What a user types, the more often the more often he does, and the state of the training in which he does.
PLAYS = (
    (["train"], NOTHING), (["train"], STOPPED), (["train"], STOPPED), (["train"], RUNNING), (["train", "-e", "watch=false"], STOPPED),
    (["train", "--tags", "restart"], STOPPED), (["train", "--tags", "restart"], RUNNING), (START, STOPPED), (["preflight"], STOPPED),
    (["status"], RUNNING), (["doctor"], RUNNING), (["stop"], RUNNING), (["collect"], RUNNING), (["reset"], RUNNING),
)  # fmt: skip


T = TypeVar("T")
State = tuple[dict[str, str], dict[str, list[str]]]  # rules of the firewalls and processes, by host


def drawn(items: Sequence[T], seed: str, number: int) -> T:
    """One of these by lot, none a second time before all were."""
    turn, place = divmod(number - 1, len(items))
    return random.Random(f"{seed}/{turn}").sample(items, len(items))[place]


class Campaign:
    def __init__(self, hosts: Hosts, seed: int, log: Path) -> None:
        self.hosts, self.seed, self.log = hosts, seed, log
        self.results = hosts.folder / "results"
        self.whole: dict[str, dict[str, str]] = {}  # digests of the hosts by the matrix libraries of their ranks
        self.left: dict[str, list[str]] = {}
        self.seconds = 30.0  # of a training that goes on where it was stopped, undisturbed

    def play(self, words: list[str], seconds: float = PLAY_SECONDS) -> tuple[int, str]:
        return Play(words, self.hosts.inventory, self.log).finish(seconds)

    def must(self, words: list[str], seconds: float = PLAY_SECONDS) -> None:
        code, said = self.play(words, seconds)
        if code != 0:
            raise Broken(f"{' '.join(words)} failed, undisturbed: {said[-3000:]}")

    # -- the run that nobody disturbs

    def prepare(self) -> None:
        """Train undisturbed from nothing to the end, and keep a training that was stopped on its way."""
        self.hosts.settings({**SETTINGS, "ddp_results_dir": str(self.results)})
        self.must(["train"], SETUP_SECONDS)
        self.remember()
        self.hosts.restore(RUN, None)
        self.must(START)
        until("some steps", lambda: min(self.hosts.step(host, RUN) for host in NAMES) >= STOPPED_AT, 300)
        limit_link(NAMES[0], SLOWER)  # so that the last step does not come before the stop
        self.must(["stop"])
        limit_link(NAMES[0])
        self.hosts.keep(RUN, STOPPED)
        begun = time.monotonic()
        self.must(["train"])
        self.seconds = time.monotonic() - begun
        if self.digests()[0] not in self.whole:
            self.remember()
        elif self.compared() != table.KEPT:
            raise Broken(
                f"a run that was stopped and went on differs from one that was not: {self.digests()} against {self.whole}"
            )
        self.left = self.hosts.processes()

    def digests(self) -> tuple[str, dict[str, str]]:
        found = {host: self.hosts.weights(host, RUN, STEPS) for host in NAMES}
        return " ".join(sorted({routes for dummy, routes in found.values()})), {
            host: one for host, (one, dummy) in found.items()
        }

    def remember(self) -> None:
        routes, found = self.digests()
        self.whole[routes] = found

    def compared(self) -> str:
        """The finished training against the undisturbed one of the same matrix libraries."""
        routes, found = self.digests()
        if routes not in self.whole:
            # Which is taken is measured at the first start of a training, and may come out otherwise on a busy machine.
            return f"finished with {routes}, of which there is no undisturbed run"
        return table.KEPT if found == self.whole[routes] else f"differs: {found} against {self.whole[routes]}"

    # -- one round

    def round(self, number: int) -> Round:
        chance = random.Random(f"{self.seed}/{number}")
        words, state = drawn(PLAYS, f"{self.seed}/playbook", number)
        name = drawn(list(FAULTS), f"{self.seed}/fault", number)
        share, lasts = chance.random(), 0.0 if name in INSTANT else chance.uniform(2.0, 40.0)
        after = share * (self.seconds if words[0] == "train" else self.seconds / 3)
        told: list[str] = []
        moment = lasted = repaired = ""
        what, play = name, None
        try:
            self.hosts.restore(RUN, None if state is NOTHING else STOPPED)
            if state is RUNNING:
                self.must(START)
            play = Play(list(words), self.hosts.inventory, self.log)
            fault = FAULTS[name](Scene(self.hosts, RUN, STEPS, chance, play))
            moment, what, lasted = self.disturb(play, fault, after, lasts)
            code, said = play.finish()
            told += [line for one in [said if code else "", *play.others] for line in messages(one)]
            told += ["(interrupted)"] if code in INTERRUPTED else []
            repaired, outcome = self.repair(said if code else "", told)
        except (Broken, HostError) as error:
            # A fault that could not be made is the campaign's own, which goes on all the same.
            outcome = f"FAILED: {error}" if isinstance(error, Broken) else f"{NOT_PLAYED}: {error}"
            if play is not None:
                play.end()
            self.hosts.end_all()
        playbook = f"{' '.join(words)}, {state}"
        return Round(
            self.seed, number, playbook, moment, what, lasted, " // ".join(dict.fromkeys(told)), repaired, outcome
        )

    def disturb(self, play: Play, fault: Any, after: float, lasts: float) -> tuple[str, str, str]:
        """Make the fault `after` seconds into the play, for `lasts` seconds."""
        end = time.monotonic() + after
        while time.monotonic() < end and play.process.poll() is None:
            time.sleep(0.1)
        what, begun = next(fault), time.monotonic()
        moment = begun - play.begun
        while time.monotonic() < begun + lasts:
            time.sleep(0.2)
        for dummy in fault:
            pass
        return f"{moment:.0f} s", what, f"{time.monotonic() - begun:.0f} s"

    def repair(self, said: str, told: list[str]) -> tuple[str, str]:
        """Do what the messages advise, until the training has come to its end."""
        done = []
        for dummy in range(TRIES):
            for words in advised(said):
                code, said = self.play(words)
                done.append(" ".join(words))
                told += messages(said) if code else []
                if code:
                    break
            else:
                if self.finished():
                    return "; ".join(done), self.judged()
        raise Broken(f"not at its last step after {'; '.join(done)}: {said[-2000:]}")

    def finished(self) -> bool:
        return all(self.hosts.has_saved(host, RUN, STEPS) and self.hosts.trainer(host, RUN) is None for host in NAMES)

    def judged(self) -> str:
        end = time.monotonic() + 30  # what an interrupted playbook left at work on a host may come to its end
        while more := self.left_over():
            if time.monotonic() > end:
                return f"FAILED: processes are left: {more}"
            time.sleep(2)
        return self.compared()

    def left_over(self) -> dict[str, list[str]]:
        found = {
            host: [one for one in running if one not in self.left[host]]
            for host, running in self.hosts.processes().items()
        }
        return {host: running for host, running in found.items() if running}


def campaign_of(given: argparse.Namespace, hosts: Hosts, seed: int, rounds: list[Round]) -> str:
    """Play the rounds; returns what is wrong in the end, or an empty text."""
    campaign, end = Campaign(hosts, seed, given.log or hosts.folder / "log"), time.monotonic() + 60 * given.minutes
    hosts.make()
    before = hosts.rulesets(), hosts.processes()
    campaign.prepare()
    print(
        f"seed {seed}: undisturbed {campaign.whole}, {campaign.seconds:.0f} s to go on from where it was stopped",
        flush=True,
    )
    play_all(campaign.round, given, rounds, end)
    campaign.must(["reset", "-e", "ddp_purge=all"])
    return left_behind(before, (hosts.rulesets(), hosts.processes()))


def play_all(play: Callable[[int], Round], given: argparse.Namespace, rounds: list[Round], end: float) -> None:
    """The rounds that are asked for, each printed and added to the report: one at least, and no further one after the end."""
    for number in given.only or range(1, given.rounds + 1):
        if rounds and time.monotonic() > end:
            print("The time is over, and no further round is begun.", flush=True)
            return
        rounds.append(played(play, number, given.report))
        if given.second_try and failed(rounds[-1]):
            print("That round failed, and is played once more:", flush=True)
            rounds[-1] = played(play, number, given.report)


def played(play: Callable[[int], Round], number: int, report: Path | None) -> Round:
    begun = time.monotonic()
    done = play(number)
    if report:
        table.add(report, [done])
    print(f"{table.row(done)} {time.monotonic() - begun:.0f} s", flush=True)
    return done


def failed(done: Round) -> bool:
    return done.outcome.startswith(("FAILED", "differs", NOT_PLAYED))


def left_behind(before: State, after: State) -> str:
    """Differences between the hosts now and before."""
    said = []
    for host in NAMES:
        old = [*before[0][host].splitlines(), *before[1][host]]
        new = [*after[0][host].splitlines(), *after[1][host]]
        lines = [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if line[:3] not in ("---", "+++")]
        said += [f"{host}:", *lines] if lines else []
    return "\n".join(["reset left the hosts otherwise than they were:", *said]) if said else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--only", type=int, nargs="+", help="these rounds of the seed alone")
    parser.add_argument("--minutes", type=float, default=60.0, help="after so many minutes no further round is begun")
    parser.add_argument("--second-try", action="store_true", help="play a round that failed once more, and count that")
    parser.add_argument("--log", type=Path, help="folder in which what every playbook printed is kept")
    parser.add_argument("--report", type=Path, help="page in Markdown to whose table the rounds are added")
    given = parser.parse_args()
    # A process started in the background ignores Ctrl-C, and its playbooks would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    hosts = Hosts(Path(tempfile.mkdtemp(prefix="nanochat-ddp-campaign-")))
    rounds: list[Round] = []
    try:
        wrong = campaign_of(given, hosts, seed, rounds)
    except (Broken, HostError) as error:
        wrong = str(error)
    finally:
        hosts.remove()
        shutil.rmtree(hosts.folder, ignore_errors=True)
    bad = sum(map(failed, rounds))
    if wrong:
        print(wrong, file=sys.stderr)
    print(f"{len(rounds) - bad} passed, {bad + bool(wrong)} failed")
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
