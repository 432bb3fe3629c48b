# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interface of every firewall. A subclass in a file of this room is a backend, found by its name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar, Dict, Sequence, Tuple, Type

from ansible_collections.nanochat.ddp.plugins.module_utils._firewall.rules import (
    Change,
    FirewallError,
    FirewallStep,
    Forbidden,
    Rule,
    Run,
)

DENIED = ("not permitted", "permission denied", "must be root", "need to be root", "authorization failed")


class FirewallBackend(ABC):
    """One kind of firewall; `run(argv)` returns (exit code, stdout, stderr), 127 for a missing program."""

    name = ""
    # Lower numbers are tried first.
    order = 0
    # Backends whose rules this one manages: if it is active, it replaces them.
    writes: ClassVar[Tuple[str, ...]] = ()
    # The program of a packet filter, whose rules may be loaded without a trace in files or services.
    packet_filter = ""
    kinds: ClassVar[Dict[str, Type[FirewallBackend]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.name] = cls

    def __init__(self, run: Run, mark: str, root: str = "/") -> None:
        self.run = run
        self.mark = mark
        self.root = root

    @abstractmethod
    def in_force(self, wanted: Sequence[Rule]) -> bool:
        """Whether this firewall is active and could drop packets that these rules would admit."""

    @abstractmethod
    def change(self, wanted: Sequence[Rule]) -> Change:
        """The steps from the job's current rules to the wanted ones."""

    @abstractmethod
    def blocking_rules(self, wanted: Sequence[Rule]) -> list[str]:
        """The first of the owner's rules that may drop such packets, in the firewall's own syntax."""

    def foreign_rules(self, wanted: Sequence[Rule]) -> list[str]:
        """Rules of other programs that may drop such packets (for example fail2ban's); reported and left alone."""
        return []

    @abstractmethod
    def names(self, known: Sequence[str]) -> set[str]:
        """The names of all jobs with rules here; `known` is for firewalls whose rules contain no name."""

    @abstractmethod
    def suspected(self) -> bool:
        """Guess without root whether this firewall is active."""

    @abstractmethod
    def suggested(self, wanted: Sequence[Rule], present: bool) -> list[FirewallStep]:
        """Commands for the owner of a host, as precise as possible without root."""

    @classmethod
    def all(cls, run: Run, mark: str) -> dict[str, FirewallBackend]:
        """Every backend by name, in order."""
        ordered = sorted(cls.kinds.values(), key=lambda kind: kind.order)
        return {kind.name: kind(run, mark) for kind in ordered}

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

    def at(self, path: str) -> str:
        """A path below a root that tests may change."""
        return os.path.join(self.root, path.lstrip("/"))
