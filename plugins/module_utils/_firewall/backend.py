# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interface of every firewall, and the steps from a job's current rules to the wanted ones."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar, List, NamedTuple, Sequence, Tuple

from .rules import MARK, FirewallError, FirewallStep, Forbidden, Rule, Run

DENIED = ("not permitted", "permission denied", "must be root", "need to be root", "authorization failed")
# Tables and chains of programs that restore their own rules, so ours would not last there.
FOREIGN = re.compile(
    r"^(f2b-|fail2ban|docker|kube-|libvirt|lxc|incus|lxd|cni-|podman|netavark|cali-|calico|cilium|flannel|crowdsec|ts-|tailscale)",
    re.I,
)
NOT_SAVED = "no service restores saved rules at boot, so these are lost at a reboot"


class Placed(NamedTuple):
    """A rule and where it is or belongs: a chain, a zone, a tool; the kind of place is the backend's own."""

    place: Tuple[str, ...]
    rule: Rule


Saved = Tuple[List[FirewallStep], str]


class Change(NamedTuple):
    """The steps from the current to the wanted rules; before and after list the job's own rules as lines."""

    steps: list[FirewallStep]
    before: list[str]
    after: list[str]
    note: str = ""  # why the rules do not survive a reboot, if they do not


class FirewallBackend(ABC):
    """One kind of firewall; `run(argv)` returns (exit code, stdout, stderr), 127 for a missing program.

    `read` comes first; the other methods answer from what it has read.
    """

    name = ""
    # Backends whose rules this one manages: if it is active, it replaces them.
    writes: ClassVar[Tuple[str, ...]] = ()
    # The program of a packet filter, whose rules may be loaded without a trace in files or services.
    packet_filter = ""

    def __init__(self, run: Run, job: str) -> None:
        self.run, self.job, self.mark = run, job, MARK + job

    @abstractmethod
    def read(self) -> None:
        """Read the rules as they are now; nothing where the tool is not installed."""

    @abstractmethod
    def in_force(self) -> bool:
        """Whether it is active and can drop incoming packets."""

    @abstractmethod
    def marked(self) -> list[Tuple[str, Placed]]:
        """The rules of all jobs, each with the name of its job."""

    @abstractmethod
    def targets(self, wanted: Sequence[Rule]) -> list[Placed]:
        """Every place where these rules belong, so that no part of this firewall can drop what they admit."""

    @abstractmethod
    def insertion(self, target: Placed) -> list[str]:
        """The command that puts a rule before those that are there."""

    @abstractmethod
    def removal(self, placed: Placed) -> list[str]:
        """The command that takes the job's rule away."""

    @abstractmethod
    def suspected(self) -> bool:
        """Guess without root whether this firewall is active."""

    def names(self, known: Sequence[str]) -> set[str]:
        """The names of all jobs with rules here; `known` are some, for firewalls whose rules contain no name."""
        return {job for job, dummy in self.marked()}

    def guessed(self, wanted: Sequence[Rule]) -> list[Placed]:
        """Where these rules belong, as far as can be told without root."""
        return [Placed((), rule) for rule in wanted]

    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[list[str]]:
        """Commands for the owner of a host."""
        return [self.insertion(one) if present else self.removal(one) for one in self.guessed(wanted)]

    def text(self, target: Placed) -> str:
        """A rule as a line for people."""
        return target.rule.text()

    def saved(self, targets: Sequence[Placed]) -> Saved:
        """The steps that keep the rules over a reboot, or why they are lost at one."""
        return [], ""

    def foreign(self) -> list[str]:
        """Chains of other programs (for example fail2ban's) that can drop incoming packets; they are left alone."""
        return []

    def change(self, wanted: Sequence[Rule], needed: Sequence[str]) -> Change:
        """To the wanted rules: those of the needed peers, and of peers that a rule of ours lets in already.

        That rule may be another job's, and go with it.
        """
        marked = self.marked()
        held = [placed for job, placed in marked if job == self.job]
        admitted = {*needed, *(placed.rule.peer for dummy, placed in marked)}
        targets = self.targets([rule for rule in wanted if rule.peer in admitted])
        # Each is put before the others, so the last comes first.
        steps = [FirewallStep(self.insertion(target)) for target in reversed(targets) if target not in held]
        steps += [FirewallStep(self.removal(placed)) for placed in held if placed not in targets]
        saved, note = self.saved(targets)
        return Change(steps + saved, self._lines(held), self._lines(targets), note)

    def _lines(self, placed: Sequence[Placed]) -> list[str]:
        return list(dict.fromkeys(self.text(one) for one in placed))

    def tool(self, *argv: str) -> str:
        """Output of a command that must succeed."""
        code, out, err = self.run(list(argv))
        if code == 0:
            return out
        words = (err or out).strip() or f"exit code {code}, no output"
        kind = Forbidden if any(text in words.lower() for text in DENIED) else FirewallError
        raise kind(f"{self.name}: `{' '.join(argv)}` failed: {words}")

    def has_program(self, program: str) -> bool:
        """Whether a program is installed."""
        return self.run([program, "--version"])[0] != 127

    def service(self, verb: str, unit: str) -> bool:
        """Whether systemd says that a unit `is-active` or `is-enabled`."""
        return self.run(["systemctl", verb, unit])[0] == 0
