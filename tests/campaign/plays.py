# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs playbooks like a user, and reads the messages in their output and the playbooks that these advise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SSH_ARGS = "-o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=5 -o ServerAliveCountMax=4"
PLAY_SECONDS = 600.0
INTERRUPTED = (-signal.SIGINT, 99, 130)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The first line of a message; deeper indented lines belong to it.
MESSAGE = re.compile(r"(FAILED|error|ERROR|\[ERROR\]:?|fatal:|Interrupted|Ctrl-C)\b")
STEP = re.compile(r"FAILED \w+ +[\d.]+ (s|min|h)\b")  # closes a step; what failed stands above it
VERDICT_OF = "doctor"  # the line above the doctor's verdict
HEALTHY = re.compile(r"(healthy|healthy-slow|not-running)\b")
EVIDENCE = re.compile(r"(rank \d+ \(|full evidence:|stack:|said:|log:)")
ADVICE = re.compile(r"train\.yml -i INVENTORY (--tags (?:restart|data|trainer))|nanochat\.ddp\.(stop|reset)\b")
LONGEST = 700
TRACEBACK = "Traceback (most recent call last)"


class Broken(Exception):
    """A promise of the product was broken."""


def interrupted_early(said: str) -> bool:
    """Whether Ctrl-C interrupted Ansible while it was still loading: Python then prints a traceback before our code runs."""
    return said.lstrip().startswith(TRACEBACK) and said.rstrip().endswith("KeyboardInterrupt")


class Play:
    """One playbook that runs, in a process group of its own."""

    def __init__(self, words: list[str], inventory: Path, log: Path) -> None:
        self.words, self.inventory, self.log, self.others = words, inventory, log, [""]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
        env |= {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NO_COLOR": "1", "LC_ALL": "C.UTF-8",
            "ANSIBLE_SSH_ARGS": f"-F {os.environ['TEST_SSH_CONFIG']} {SSH_ARGS}",
        }  # fmt: skip
        argv = ["ansible-playbook", f"nanochat.ddp.{words[0]}", "-i", str(inventory), *words[1:]]
        self.begun = time.monotonic()
        log.mkdir(parents=True, exist_ok=True)
        self.path = log / f"{len(list(log.iterdir())):03}-{'_'.join(words)}.txt"
        with self.path.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )  # fmt: skip

    def again(self) -> Play:
        return Play(self.words, self.inventory, self.log)

    def heard(self, code: int, said: str) -> None:
        """The output that another controller got at the same time."""
        self.others.append(said if code else "")

    def finish(self, seconds: float = PLAY_SECONDS) -> tuple[int, str]:
        """Its exit code and what it printed; Broken where it does not end or prints what nobody should see."""
        try:
            code = self.process.wait(max(1.0, seconds - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            self.end()
            raise Broken(f"{self} did not end within {seconds:.0f} s: {self.said()[-3000:]}") from None
        said = self.said()
        if TRACEBACK in said and not (code in INTERRUPTED and interrupted_early(said)):
            raise Broken(f"{self} showed a traceback: {said[-3000:]}")
        if code not in (0, *INTERRUPTED) and not messages(said):
            raise Broken(f"{self} ended with {code} and no message: {said[-3000:]}")
        return code, said

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def said(self) -> str:
        return ANSI.sub("", self.path.read_text(encoding="utf-8", errors="replace")).replace("\r", "\n")

    def __str__(self) -> str:
        return f"nanochat.ddp.{' '.join(self.words)}"


def messages(said: str) -> list[str]:
    """A playbook's errors and its doctor's findings, one line each."""
    found: list[list[str]] = []
    inside, above = -1, ""  # indentation of the current message
    for line in filter(str.strip, said.splitlines()):
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if STEP.match(text):
            inside = -1
        elif MESSAGE.match(text) or (above == VERDICT_OF and not HEALTHY.match(text)):
            inside = depth
            found.append([text])
        elif depth > inside >= 0:
            if not EVIDENCE.match(text):
                found[-1].append(text)
        else:
            inside = -1
        above = text
    return list(dict.fromkeys(" ".join(" ".join(lines).split())[:LONGEST] for lines in found))


def advised(said: str) -> list[list[str]]:
    """The command lines of the playbooks that a failed one's messages name, and then of the training itself."""
    text = " ".join(messages(said))
    named = [["train", *tags.split()] if tags else [verb] for tags, verb in ADVICE.findall(text)]
    plays = [list(words) for words in dict.fromkeys(map(tuple, named))]
    return plays if ["train", "--tags", "restart"] in plays[-1:] else [*plays, ["train"]]
