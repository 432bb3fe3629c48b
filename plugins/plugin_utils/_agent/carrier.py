# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Carries a verb of this collection to a host, and brings back its answer, at almost no cost to the host.

A module starts a Python with all of Ansible's code, which takes five times as long as reading the run folder. A verb is a function
of module_utils, sent with what it imports through a pipe to a Python that loads nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

from ...module_utils._contract.decode import decode
from ...module_utils._contract.document import section
from ...module_utils._contract.settings_table import rows
from ...module_utils._contract.validate import InvalidHostData, absolute_path
from ...module_utils._kit import bare, host_code

MARK = "nanochat-ddp-answer "
SLEPT_SECONDS = 10.0  # clocks that differ by this much more than before
Answer = TypeVar("Answer")
# How the keys of a result begin that Ansible itself or our display obeys or prints, whatever the version: only the controller may set them.
ORDERS = ("add_host", "add_group", "ansible_", "_ansible", "invocation", "show", "terminal", "over")


# The verbs of hosts by the file of module_utils with the functions of these names.
HOST_FILES = {
    "_probe.host": ("host_info",),
    "_run.polling": ("run_info",),
    "_run.find": ("run_files",),
    "_keeper.deployment": ("run_folder", "keeper_request", "purge"),
    "_kit.env_file": ("env_file",),
    "_session.tracker": ("start_tracker",),
    "_session.session": ("tmux_session",),
    "_doctor.gather": ("doctor_info",),
    "_preflight.peer_check": ("peer_check", "start_responder", "stop_responder"),
    "_preflight.programs": ("run_program", "start_program", "end_program", "keep_measured"),
    "_shards.make": ("make_data",),
    "_shards.states": ("shard_sync",),
    "_trainer.files": ("trainer_files",),
    "_trainer.venv": ("trainer_venv", "lacking_wheels"),
}
HOST_VERBS = {verb: file for file, found in HOST_FILES.items() for verb in found}


class Call(NamedTuple):
    """One task's call of a verb."""

    action: ActionBase
    variables: Mapping[str, Any]

    @property
    def check(self) -> bool:
        return bool(self.action._task.check_mode)

    @property
    def host(self) -> str:
        """The host that is asked, by its name in the inventory."""
        return str(self.action._task.delegate_to or self.variables.get("inventory_hostname"))

    @property
    def known(self) -> Mapping[str, object]:
        """The variables of the host that is asked."""
        return self.variables["hostvars"][self.host] if self.action._task.delegate_to else self.variables

    def variable(self, name: str) -> Any:
        """A variable of the host that is asked; None if it has none."""
        return self.action._templar.template(self.known.get(name))

    def which_run(self, run: str | None = None) -> dict[str, Any]:
        """Where the host has the run: the base folder, and the name (None: the newest), of this play's plan or else of the settings."""
        node, plan = self.variable("ddp_node") or {}, self.variable("ddp_plan") or {}
        base_dir = node.get("base_dir") or self.variable("ddp_base_dir") or rows()["ddp_base_dir"].default
        return {"base_dir": base_dir, "run": run or plan.get("run") or self.variable("ddp_run") or None}

    def located(self, params: Mapping[str, object]) -> dict[str, Any]:
        """Parameters, with the run that is meant unless they say where it is."""
        return {**({} if {"run_dir", "base_dir"} & set(params) else self.which_run()), **params}

    def ask(self, verb: str, **params: Any) -> dict[str, Any]:
        """The host's answer to a verb of its own; asked once more if the connection broke while this machine slept."""
        return across_sleep(self.action, lambda: self.ask_once(verb, **params))

    def ask_once(self, verb: str, **params: Any) -> dict[str, Any]:
        """The same over a connection that works."""
        return piped(self.action, program(self, verb, params), self.known)


def program(call: Call, verb: str, params: Mapping[str, object]) -> str:
    """The program that calls a verb on the host, in the environment of the task."""
    environ = {name: str(value) for one in call.action._task.environment or () for name, value in one.items()}
    module, usual = f"{host_code.PACKAGE}.{HOST_VERBS[verb]}", {"check": call.check, "host": call.host}
    text = host_code.program(bare.__name__, "answer", MARK, module, verb, params, usual, environ, needs=(module,))
    # A hundred kilobytes, five times for the simplest play, are slow over a slow link; a quarter of that is not.
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii")
    return f"import base64, zlib\nexec(zlib.decompress(base64.b64decode('{packed}')))\n"


def read_sources() -> None:
    """Read the sources of all verbs, before Ansible forks for each host."""
    for file in HOST_FILES:
        host_code.sources_text((f"{host_code.PACKAGE}.{file}", bare.__name__))


FOUND = "nanochat-ddp-python "
# The first of several Pythons that runs; it may be a pyenv shim for a version that is not installed.
FIRST = (
    'for one in {names}; do found=$(command -v "$one") && "$found" -I -S -c "" </dev/null >/dev/null 2>&1 '
    '&& echo "{mark}$found" && exec "$found" "$@"; done; exit 127'
)


def python_of(action: ActionBase, variables: Mapping[str, object]) -> list[str]:
    """The Python from the inventory, or the one that Ansible found or would find: a host's answer about its
    Python must not depend on who asks."""
    named = action._templar.template(variables.get("ansible_python_interpreter"))
    found = section(variables, "ansible_facts").get("discovered_interpreter_python")
    known = next((str(one) for one in (named, found) if one and str(one).startswith("/")), None)
    if known:
        return [known]
    names: Any = variables.get("ansible_interpreter_python_fallback") or constants.INTERPRETER_PYTHON_FALLBACK
    return ["sh", "-c", FIRST.format(names=shlex.join(names), mark=FOUND), "sh"]


def piped(action: ActionBase, text: str, variables: Mapping[str, object]) -> dict[str, Any]:
    """The answer of a program through the connection's pipe, or a sentence why there is none."""
    if not action._connection.has_pipelining:
        return {"failed": True, "msg": f"the connection {action._connection.ansible_name} takes no program; use ssh"}
    python = python_of(action, variables)
    answer = action._low_level_execute_command(shlex.join([*python, "-I", "-S", "-"]), in_data=text.encode())
    lines = str(answer.get("stdout") or "").splitlines()
    told = answer_in(lines)
    if told is None:
        said = str(answer.get("stderr") or "").strip().splitlines() or ["it says nothing"]
        named = f"the interpreter {python[0]}" if len(python) == 1 else "a Python interpreter"
        why = f"{named} was not found" if answer.get("rc") == 127 else "its Python ended without an answer"
        return {"failed": True, "msg": f"{why}: {said[-1]}"}
    return {**told, **discovered(action, lines)}


def answer_in(lines: list[str]) -> dict[str, Any] | None:
    """The answer in a program's output, without what Ansible or the action would obey; None if there is none, or not JSON."""
    found = [line[len(MARK) :] for line in lines if line.startswith(MARK)]
    try:
        answer = {"changed": False, **json.loads(found[-1])}
    except (IndexError, TypeError, ValueError, RecursionError):
        return None
    return {key: value for key, value in answer.items() if not key.startswith(ORDERS)}


def discovered(action: ActionBase, lines: list[str]) -> dict[str, object]:
    """Stores the found Python where Ansible does, so that its modules use a working one too."""
    found = next((line[len(FOUND) :] for line in lines if line.startswith(FOUND)), "")
    if not found or action._task.delegate_to:
        return {}
    try:
        return {"ansible_facts": {"discovered_interpreter_python": absolute_path(found)}}
    except InvalidHostData:
        return {}


def decoded(answer: Mapping[str, object], documents: Mapping[str, Any], host: object) -> dict[str, Any]:
    """A host's answer with its documents (key -> type) decoded, or a failed one with a sentence about what does not fit."""
    if answer.get("failed") or answer.get("unreachable"):
        return dict(answer)
    try:
        return {**answer, **{name: decode(kind, answer.get(name)) for name, kind in documents.items()}}
    except InvalidHostData as why:
        return {"changed": False, "failed": True, "msg": f"{host} sent an invalid answer: {why}"}


def drop_connection(action: ActionBase) -> None:
    """Drop the connection, so that the next question opens another."""
    action._connection.close()
    with contextlib.suppress(AnsibleError, OSError):
        # A persistent connection would seem to work however long the host is frozen.
        action._connection.reset()


def across_sleep(action: ActionBase, ask: Callable[[], Answer]) -> Answer:
    """The answer; asked for once more if the connection broke while this machine slept."""
    before = time.time() - time.monotonic()
    try:
        return ask()
    except AnsibleConnectionFailure:
        # Only the monotonic clock stops during sleep.
        if time.time() - time.monotonic() - before < SLEPT_SECONDS:
            raise
        drop_connection(action)
        return ask()
