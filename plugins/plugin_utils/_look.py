# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Polls a host, or makes a small change, at almost no cost to it.

A module starts a Python with all of Ansible's code, which takes five times as long as reading the run folder. Quick tasks are
sent as bare code instead, to a Python that loads nothing else. If no answer comes, the module runs, possibly a second
time: so this is only for idempotent tasks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import time
import zlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

from ..module_utils._contract.decode import decode
from ..module_utils._contract.document import section
from ..module_utils._contract.validate import InvalidHostData, absolute_path
from ..module_utils._kit import host_code
from ..module_utils._kit.arguments import beyond

Options = Mapping[str, Mapping[str, object]]
MARK = "nanochat-ddp-look "
SLEPT_SECONDS = 10.0  # clocks that differ by this much more than before
Answer = TypeVar("Answer")
# How the keys of a result begin that Ansible itself obeys, whatever its version.
ORDERS = ("add_host", "add_group", "ansible_", "_ansible")


def defaults_of(options: Options) -> dict[str, object]:
    """A module's defaults."""
    return {name: option.get("default") for name, option in options.items()}


def program(code: ModuleType, params: Mapping[str, Any]) -> str:
    """The program of a file of ours, whose function `say` answers on the host, with its parameters."""
    text = host_code.program(code.__name__, "say", MARK, dict(params))
    # A hundred kilobytes, five times for the simplest play, are slow over a slow link; a quarter of that is not.
    packed = base64.b64encode(zlib.compress(text.encode("utf-8"))).decode("ascii")
    return f"import base64, zlib\nexec(zlib.decompress(base64.b64decode('{packed}')))\n"


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


def bare_answer(
    action: ActionBase, code: ModuleType, params: Mapping[str, Any], variables: Mapping[str, object]
) -> dict[str, object] | None:
    """The program's answer; None if bare code cannot run there, and the module must be asked, which explains why."""
    execute = getattr(action, "_low_level_execute_command", None)
    if execute is None or not action._connection.has_pipelining:
        return None
    argv = [*python_of(action, variables), "-I", "-S", "-"]
    answer = execute(shlex.join(argv), in_data=program(code, params).encode())
    lines = str(answer.get("stdout") or "").splitlines()
    for line in reversed(lines):
        if line.startswith(MARK):
            told = result_in(line[len(MARK) :])
            return told and {**told, **discovered(action, lines)}
    return None


def discovered(action: ActionBase, lines: list[str]) -> dict[str, object]:
    """Stores the found Python where Ansible does, so that its modules use a working one too."""
    found = next((line[len(FOUND) :] for line in lines if line.startswith(FOUND)), "")
    if not found or action._task.delegate_to:
        return {}
    try:
        return {"ansible_facts": {"discovered_interpreter_python": absolute_path(found)}}
    except InvalidHostData:
        return {}


def result_in(text: str) -> dict[str, object] | None:
    """A host's answer without the keys by which Ansible adds hosts, sets variables or counts; None if invalid."""
    try:
        told = {"changed": False, **json.loads(text)}
    except (TypeError, ValueError, RecursionError):
        return None
    return {key: value for key, value in told.items() if not key.startswith(ORDERS)}


def decoded(answer: Mapping[str, Any], documents: Mapping[str, Any], host: object) -> dict[str, Any]:
    """A host's answer with its documents (key -> type) decoded, or a failed one with a sentence about what does not fit."""
    if answer.get("failed") or answer.get("unreachable"):
        return dict(answer)
    try:
        return {**answer, **{name: decode(kind, answer.get(name)) for name, kind in documents.items()}}
    except InvalidHostData as why:
        return {"changed": False, "failed": True, "msg": f"{host} sent an invalid answer: {why}"}


def drop_connection(action: ActionBase) -> None:
    """Drop the connection, and the temporary folder that can no longer be removed through it."""
    action._connection.close()
    with contextlib.suppress(AnsibleError, OSError):
        # A persistent connection would seem to work however long the host is frozen.
        action._connection.reset()
    shell = getattr(action._connection, "_shell", None)
    if shell is not None:
        shell.tmpdir = None


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


def code_answer(
    action: ActionBase, code: ModuleType, params: Mapping[str, Any], variables: Mapping[str, object]
) -> dict[str, object] | None:
    """The answer that the module with this code would give; None if the module itself must answer or refuse."""
    if any(beyond(params, getattr(code, "BOUNDS", {}))):
        return None
    return bare_answer(action, code, {**defaults_of(code.OPTIONS), **params}, variables)


def unexpanded(options: Options) -> dict[str, Mapping[str, object]]:
    """A module's options with unexpanded paths: the host expands them, with its own home."""
    return {name: {**option, "type": "str"} if option["type"] == "path" else option for name, option in options.items()}


class BareAction(ActionBase):
    """The module of the same name at almost no cost to the host; the module itself if that fails."""

    _supports_check_mode = True
    _supports_async = False
    # The file with the module's OPTIONS, whose `say` answers.
    CODE: ClassVar[ModuleType]
    CHECKS: ClassVar[Mapping[str, object]] = {}
    # The documents in its answer, by key.
    ANSWER: ClassVar[Mapping[str, Any]] = {}
    # Whether it changes something, and so needs the check mode flag.
    CHANGES: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        # Read once, before Ansible forks for each host.
        host_code.sources_text(cls.CODE.__name__)

    def run(self, tmp: str | None = None, task_vars: dict[str, object] | None = None) -> dict[str, object]:
        """The host's answer."""
        variables = task_vars or {}
        result: dict[str, object] = super().run(tmp, variables)
        arguments = self.arguments(variables)
        options = self.validate_argument_spec(unexpanded(self.CODE.OPTIONS), **self.CHECKS)[1]
        told = {**options, **arguments, **self.told_by_ansible()}

        def ask() -> dict[str, object]:
            seen = code_answer(self, self.CODE, told, variables)
            if seen is None:
                seen = self._execute_module(module_args={**self._task.args, **arguments}, task_vars=variables)
                seen.pop("invocation", None)
            return seen

        seen = across_sleep(self, ask)
        host = self._task.delegate_to or variables.get("inventory_hostname")
        result.update(decoded(seen, self.ANSWER, host))
        return result

    def arguments(self, variables: Mapping[str, object]) -> dict[str, object]:
        """Arguments that the controller adds to the task's."""
        return {}

    def told_by_ansible(self) -> dict[str, object]:
        """Arguments that Ansible itself would give a module."""
        return {"check": self._task.check_mode} if self.CHANGES else {}
