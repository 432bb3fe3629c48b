# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a module's arguments, so that any input ends in a result or a one-sentence error."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, Iterator, Mapping

from ansible.module_utils import basic

# Deeper than any document of ours; Python itself gives up at about a thousand.
DEEPEST = 50
BIGGEST = 2**63
# Exceptions that Python raises for values of an unexpected type or size.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def checked_module(
    argument_spec: Mapping[str, object], bounds: Mapping[str, tuple[float, float]] | None = None, **options: Any
) -> Any:
    """An AnsibleModule that rejects NUL bytes, numbers beyond 64 bits and endless nesting in its arguments.

    bounds: minimum and maximum of numbers, by option name (`wait.timeout` for a suboption). What the module makes, nobody but its
    user may write, whatever the umask.
    """
    os.umask(os.umask(0) | 0o022)
    try:
        module = basic.AnsibleModule(argument_spec=argument_spec, **options)
    except UNREADABLE as error:  # Ansible's own parsing or conversion failed
        # The arguments explain it better than the exception does.
        fail(next(problems(_given()), "") or f"An argument cannot be used: {error}")
    for problem in [*problems(module.params), *beyond(module.params, bounds or {})]:
        module.fail_json(msg=problem)
    return module


def beyond(params: Mapping[str, object], bounds: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Report numbers out of bounds, so that a typing error causes no endless wait, loop or list."""
    for name, (least, most) in bounds.items():
        value: Any = params
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not least <= value <= most:
            yield f"{name} is {value}; it must be between {least:g} and {most:g}."


def problems(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    """Report invalid values by their place in the arguments; the value itself may be a secret."""
    named = name or "the arguments"
    if depth > DEEPEST:
        yield f"{named} is nested more than {DEEPEST} levels deep; no option accepts that."
    elif isinstance(value, str):
        if "\0" in value:
            yield f"{named} contains a NUL byte; remove it."
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{named} is {value}; it must be a finite number."
    elif isinstance(value, int) and not -BIGGEST <= value < BIGGEST:
        yield f"{named} is a number beyond 64 bits; it must be a smaller one."
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from problems(str(key), f"a name in {named}", depth + 1)
            yield from problems(item, f"{name}.{_shown(key)}" if name else _shown(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from problems(item, f"{name}[{number}]", depth + 1)


def _shown(key: Any) -> str:
    return str(key)[:60].encode("ascii", "backslashreplace").decode()


def _given() -> Any:
    """The raw arguments, as far as Ansible exposes them."""
    try:
        return {name: value for name, value in basic._load_params().items() if not str(name).startswith("_ansible_")}
    except Exception:  # of whatever kind: then there is nothing more to say
        return {}


def fail(sentence: str) -> None:
    """Exit like fail_json, before there is a module."""
    sys.stdout.write(json.dumps({"failed": True, "changed": False, "msg": sentence}) + "\n")
    raise SystemExit(1)
