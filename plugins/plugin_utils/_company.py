# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Child processes follow the hosts beyond Ansible's forks.

Ansible handles as many hosts at a time as it has forks, which no play can set. A task that follows a run ends with the run, so hosts
beyond the forks would be followed only when it is over. A child has its own connection and leaves its host's
result in a file; when Ansible gets to that host, its task finds the file and has nothing left to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar

from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.plugins.connection import ConnectionBase
from ansible.plugins.loader import connection_loader
from ansible.utils.display import Display

from ..module_utils._contract.document import Document
from ..module_utils._kit import host_code
from ..module_utils._kit.files import read_object, write_json
from ..module_utils._kit.printable import printable
from . import _configuration
from ._look import code_answer, decoded, drop_connection

display = Display()

RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")
COMPANY_SECONDS = 5.0  # how often to check the children when idle


@contextlib.contextmanager
def answered_within(wait: Any) -> Iterator[None]:
    """Drop the connection a while after its answer was due, because one to a frozen host never breaks."""
    seconds = wait["timeout"] if isinstance(wait, dict) else wait
    seconds_to_wait = int(seconds or 0) + ANSWER_SECONDS

    def give_up(number: int, frame: Any) -> None:
        raise AnsibleConnectionFailure(f"the host did not answer within {seconds_to_wait} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds_to_wait)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def abandoned() -> bool:
    """Whether the process that started this one is gone without ending it: a killed playbook run, or a child's parent."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


def taken_along(hosts: Sequence[str], host: str, forks: int) -> list[str]:
    """The hosts that accompany this one: Ansible starts its first processes in this order, and has none left for the rest."""
    # A failed host still runs `always` tasks, but no longer counts.
    place = hosts.index(host) if host in hosts else forks
    return list(hosts[place + forks :: forks]) if place < forks else []


class Ledger:
    """Files by which the processes of a playbook run share their hosts' state, in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Mapping[str, Any]) -> None:
        """Write a host's entry atomically."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> Document:
        """A host's entry; empty if there is none."""
        return read_object(str(self.path(host)))

    def forget(self, host: str) -> None:
        """Remove a host's entry."""
        self.path(host).unlink(missing_ok=True)

    def claim(self, host: str, wait: bool) -> IO[str] | None:
        """Claim the host for this process until it closes the file; None if another one has it and waiting is not wanted."""
        lock = self.path(host).with_suffix(".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return lock

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, because inventory names may contain anything."""
        return self.folder / (host.encode().hex() + ".json")


def ledger_of(action: ActionBase, name: str) -> Ledger:
    """The ledger of that name, shared by the task's processes."""
    return Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"{name}-{action._task._uuid}")


def connection_to(host: str, known: Mapping[str, Any], action: ActionBase, password: str | None) -> ConnectionBase:
    """A connection to a host other than the action's, as Ansible would make it from that host's variables."""
    play = action._play_context.copy()
    play.remote_addr, play.password = host, password
    connection = connection_loader.get(known.get("ansible_connection") or action._task.connection, play, new_stdin=None)
    # A task also has retries and timeout, with another meaning.
    keys = {name: value for name, value in action._task.dump_attrs().items() if name not in ("retries", "timeout")}
    named = constants.config.get_plugin_vars("connection", connection._load_name)
    connection.set_options(
        task_keys={**keys, "timeout": play.timeout, **({"password": password} if password else {})},
        var_options={name: known[name] for name in named if name in known},
    )
    return connection


def common_password(action: ActionBase, variables: Mapping[str, Any]) -> str | None:
    """The password entered for all hosts, unless a host has its own."""
    has_its_own = any(name in variables for name in PASSWORDS)
    return None if has_its_own else action._play_context.password


class FollowingAction(ActionBase):
    """An action that follows a host to its end through broken connections, and accompanying hosts with it."""

    _supports_check_mode = True
    _supports_async = False
    _supports_diff = False
    # The repeated request: a module, and the file with its OPTIONS whose `say` answers.
    MODULE: ClassVar[str]
    CODE: ClassVar[ModuleType]
    # The documents in its answer, by key.
    ANSWER: ClassVar[Mapping[str, Any]]
    # One process makes all attempts of a host's loop, but with a new object each time.
    _company: ClassVar[list[BaseProcess] | None] = None
    # The host's claim.
    _claim: ClassVar[IO[str] | None] = None
    # In a child: the state of its host.
    _known: Mapping[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        # Read once, before Ansible forks for each host.
        host_code.sources_text(cls.CODE.__name__)

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """Return at once for a host that another process has followed to its end, or in an abandoned loop."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        host, results = str(variables["inventory_hostname"]), ledger_of(self, "results")
        # Any end frees a process for the next host, so its child may still be working.
        type(self)._claim = self._claim or results.claim(host, wait=True)
        if abandoned():
            result.update(failed=True, over=True, msg="The playbook run that asked is gone, so nobody waits for this.")
        else:
            result.update(results.read(host))
        return result

    def follow(self, host: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Follow a host to its end; returns the result of that host's task."""
        raise NotImplementedError

    def ask(self, arguments: dict[str, Any], variables: Any) -> dict[str, Any] | None:
        """The host's answer; None, after a pause, if it is unreachable."""
        try:
            with answered_within(arguments.get("wait")):
                answer = code_answer(self, self.CODE, arguments, self._known or variables)
                if answer is None and self._known:
                    raise AnsibleError("it can be asked by a module only")
                answer = answer or self._execute_module(self.MODULE, module_args=arguments, task_vars=variables)
                return decoded(answer, self.ANSWER, (self._known or variables).get("inventory_hostname"))
        except AnsibleConnectionFailure:
            drop_connection(self)
            time.sleep(RETRY_SECONDS)
            return None

    def cleanup(self, force: bool = False) -> None:
        """The connection may break here too, after the answer."""
        try:
            super().cleanup(force)
        except AnsibleConnectionFailure:
            drop_connection(self)

    # -- accompanying hosts ------------------------------------------------------------------------------------------------

    def take_along(self, variables: Mapping[str, Any]) -> list[str]:
        """The accompanying hosts; each gets its process the first time."""
        hosts = list(variables["ansible_play_batch"])
        others = taken_along(hosts, str(variables["inventory_hostname"]), _configuration.forks())
        if self._company is None:
            type(self)._company = [self._child(other, variables) for other in others]
        return others

    def _child(self, host: str, variables: Mapping[str, Any]) -> BaseProcess:
        """A process for another host; it exits with this one, and with its group at an interrupt."""
        context = multiprocessing.get_context("fork")
        child: BaseProcess = context.Process(target=self._follow_other, args=(host, variables), daemon=True)
        child.start()
        return child

    def accompanied(self) -> bool:
        """Whether accompanying hosts have not ended yet; waits a while for one that does."""
        going = [child.sentinel for child in self._company or [] if child.is_alive()]
        if going:
            wait(going, COMPANY_SECONDS)
        return bool(going)

    def _follow_other(self, host: str, variables: Mapping[str, Any]) -> None:
        """In the child: follow another host, and leave the result for that host's task."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # The handlers are copies of the parent's, and would not end this process.
            signal.signal(number, signal.SIG_DFL)
        results = ledger_of(self, "results")
        claim = results.claim(host, wait=False)
        if claim is None:
            return
        try:
            result = self._for_other(host, variables).follow(host, variables)
        except Exception as why:  # whatever it is, the host's own task will meet and report it
            total, forks = len(variables["ansible_play_batch"]), _configuration.forks()
            told = _configuration.followed_later(host, str(why), total, forks)
            display.display(printable(told), color=constants.COLOR_WARN, stderr=True)
        else:
            results.write(host, result)

    def _for_other(self, host: str, variables: Mapping[str, Any]) -> FollowingAction:
        """The same action for another host."""
        known = variables["hostvars"][host]
        connection = connection_to(host, known, self, common_password(self, variables))
        play, loaders = connection._play_context, self._shared_loader_obj
        other = type(self)(self._task, connection, play, self._loader, self._templar, loaders)
        other._known = known
        return other
