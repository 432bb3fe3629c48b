# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts for which Ansible has no process are followed by children of the processes that it has.

Ansible works on as many hosts at a time as it has forks, and no play can set that. What follows a run ends with the run, so the hosts
beyond the forks would be followed only when there is nothing left to see. A child has a connection of its own, and leaves what came of
its host in a file; when Ansible comes to that host, its task finds the file and has nothing left to do.
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
from ansible.playbook.play_context import PlayContext
from ansible.plugins.action import ActionBase
from ansible.plugins.connection import ConnectionBase
from ansible.plugins.loader import connection_loader
from ansible.utils.display import Display
from ansible.utils.multiprocessing import context
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object, write_json
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.printable import printable
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _configuration
from ansible_collections.nanochat.ddp.plugins.plugin_utils._look import code_answer

display = Display()

RETRY_SECONDS = 5.0
ANSWER_SECONDS = 25
COMPANY_SECONDS = 5.0  # how often to look after the children when nothing else is left to do


@contextlib.contextmanager
def answered_within(wait: Any) -> Iterator[None]:
    """A connection to a host that froze carries nothing and never breaks; it is given up a while after its answer was due."""
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
    """Whether whoever started this process is gone without having ended it: the playbook run that was killed, or the process of a child."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


def taken_along(hosts: Sequence[str], host: str, forks: int) -> list[str]:
    """The hosts that go along with this one: Ansible starts its first processes in this order, and has none left for the rest."""
    # A host that has failed plays on in what is done always, but no longer counts.
    place = hosts.index(host) if host in hosts else forks
    return list(hosts[place + forks :: forks]) if place < forks else []


class Ledger:
    """Files by which the processes of one playbook run tell each other about their hosts, in its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, host: str, entry: Mapping[str, Any]) -> None:
        """Put a host's entry there, whole or not at all."""
        write_json(str(self.path(host)), entry)

    def read(self, host: str) -> Document:
        """A host's entry; empty while there is none."""
        return read_object(str(self.path(host)))

    def forget(self, host: str) -> None:
        """Have no entry of a host any more."""
        self.path(host).unlink(missing_ok=True)

    def claim(self, host: str, wait: bool) -> IO[str] | None:
        """Make the host this process's own until it closes the file; None where another one has it and that is not waited for."""
        lock = self.path(host).with_suffix(".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return lock

    def path(self, host: str) -> Path:
        """A host's file; the name is quoted, since an inventory name may hold anything."""
        return self.folder / (host.encode().hex() + ".json")


def ledger_of(action: ActionBase, name: str) -> Ledger:
    """The one of that name that the task's processes share."""
    return Ledger(Path(constants.DEFAULT_LOCAL_TMP) / f"{name}-{action._task._uuid}")


def connection_to(host: str, known: Mapping[str, Any], action: ActionBase, password: str | None) -> ConnectionBase:
    """A connection to another host than the action's, as Ansible itself would make it of that host's variables."""
    play: PlayContext = action._play_context.copy()
    play.remote_addr, play.password = host, password
    connection = connection_loader.get(known.get("ansible_connection") or action._task.connection, play, new_stdin=None)
    # A task has retries and a timeout, too, and means something else by them.
    keys = {name: value for name, value in action._task.dump_attrs().items() if name not in ("retries", "timeout")}
    named = constants.config.get_plugin_vars("connection", connection._load_name)
    connection.set_options(
        task_keys={**keys, "timeout": play.timeout, **({"password": password} if password else {})},
        var_options={name: known[name] for name in named if name in known},
    )
    return connection


def common_password(action: ActionBase, variables: Mapping[str, Any]) -> str | None:
    """The password that was asked for, which holds for all hosts; a host's own password has taken its place where there is one."""
    has_its_own = any(name in variables for name in constants.MAGIC_VARIABLE_MAPPING["password"])
    return None if has_its_own else action._play_context.password


class FollowingAction(ActionBase):
    """An action that follows a host until there is nothing more to see, through broken connections; and hosts without a process with it."""

    _supports_check_mode = True
    _supports_async = False
    _supports_diff = False
    # What is asked of a host, again and again: a module, and the file with its OPTIONS whose `say` answers.
    MODULE: ClassVar[str]
    CODE: ClassVar[ModuleType]
    # One process makes all the attempts of a host's loop, but with a new object for each.
    _company: ClassVar[list[BaseProcess] | None] = None
    # What makes the host this process's own.
    _claim: ClassVar[IO[str] | None] = None
    # In a child: what is known of the host that it follows.
    _known: Mapping[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        # Read once, before Ansible makes a process for each host.
        host_code.sources_text(cls.CODE.__name__)

    def run(self, tmp: Any = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """Return at once for a host that another process has followed to its end, and in a loop for which nobody waits any more."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        host, results = str(variables["inventory_hostname"]), ledger_of(self, "results")
        # Any end makes room for the next host, so its child may well be at work still.
        type(self)._claim = self._claim or results.claim(host, wait=True)
        if abandoned():
            result.update(failed=True, over=True, msg="The playbook run that asked is gone, so nobody waits for this.")
        else:
            result.update(results.read(host))
        return result

    def follow(self, host: str, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Follow a host, this one's or one that goes along, to its end; returns the result of that host's task."""
        raise NotImplementedError

    def ask(self, arguments: dict[str, Any], variables: Any) -> dict[str, Any] | None:
        """The host's answer; None, after a pause, if it cannot be reached."""
        try:
            with answered_within(arguments.get("wait")):
                answer = code_answer(self, self.CODE, arguments, self._known or variables)
                if answer is None and self._known:
                    raise AnsibleError("it can be asked by a module only")
                return answer or dict(self._execute_module(self.MODULE, module_args=arguments, task_vars=variables))
        except AnsibleConnectionFailure:
            self._begin_again()
            time.sleep(RETRY_SECONDS)
            return None

    def cleanup(self, force: bool = False) -> None:
        """The connection may break here too, after the answer."""
        try:
            super().cleanup(force)
        except AnsibleConnectionFailure:
            self._begin_again()

    def _begin_again(self) -> None:
        """Forget the connection, and the temporary folder that can no longer be removed through it."""
        self._connection.close()
        with contextlib.suppress(AnsibleError, OSError):
            # One that is kept open for later tasks would seem to stand, however long the host is frozen.
            self._connection.reset()
        self._connection._shell.tmpdir = None

    # -- the hosts that go along ------------------------------------------------------------------------------------------

    def take_along(self, variables: Mapping[str, Any]) -> list[str]:
        """The hosts that go along with this one; each gets its process the first time."""
        hosts = list(variables["ansible_play_batch"])
        others = taken_along(hosts, str(variables["inventory_hostname"]), _configuration.forks())
        if self._company is None:
            type(self)._company = [self._child(other, variables) for other in others]
        return others

    def _child(self, host: str, variables: Mapping[str, Any]) -> BaseProcess:
        """A process for another host; it ends with this one, whose own it is, and with its group when somebody interrupts."""
        child: BaseProcess = context.Process(target=self._follow_other, args=(host, variables), daemon=True)
        child.start()
        return child

    def accompanied(self) -> bool:
        """Whether some that went along are not at their end; waits a while for one that comes to it."""
        going = [child.sentinel for child in self._company or [] if child.is_alive()]
        if going:
            wait(going, COMPANY_SECONDS)
        return bool(going)

    def _follow_other(self, host: str, variables: Mapping[str, Any]) -> None:
        """The child's part: follow another host, and leave what came of it for that host's own task."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # The handlers are those of the process that this one was copied from, and would not end this one.
            signal.signal(number, signal.SIG_DFL)
        results = ledger_of(self, "results")
        claim = results.claim(host, wait=False)
        if claim is None:
            return
        try:
            result = self._for_other(host, variables).follow(host, variables)
        except Exception as why:  # whatever it is, the host's own task will meet it, and tell
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
