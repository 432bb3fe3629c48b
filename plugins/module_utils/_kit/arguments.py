# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one way in which a module takes its arguments: whatever they hold, it ends in a result or in a sentence."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Iterator, Mapping

from ansible.module_utils import basic

# Deeper than any document of ours; Python itself gives up at about a thousand.
DEEPEST = 50
BIGGEST = 2**63
# What Python raises over a value that is not of the kind or size that code takes for granted.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def checked_module(
    argument_spec: Mapping[str, object], bounds: Mapping[str, tuple[float, float]] | None = None, **options: Any
) -> Any:
    """An AnsibleModule whose arguments a program can hold: no NUL byte, no broken text, no number beyond 64 bits, no endless nesting.

    bounds: the least and the most of numbers, by the name of their option (`wait.timeout` for one within another).
    """
    try:
        module = basic.AnsibleModule(argument_spec=argument_spec, **options)
    except UNREADABLE as error:  # Ansible's own reading or conversion has given up
        # What it was given says why better than its exception does.
        fail(next(problems(_given()), "") or f"An argument cannot be used: {error}")
    for problem in [*problems(module.params), *beyond(module.params, bounds or {})]:
        module.fail_json(msg=problem)
    return module


def beyond(params: Mapping[str, object], bounds: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Numbers that are out of their bounds, which would make an endless wait, a loop or a list without end of a typing error."""
    for name, (least, most) in bounds.items():
        value: Any = params
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not least <= value <= most:
            yield f"{name} is {value}; it must be between {least:g} and {most:g}."


def problems(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    """Name the values that no program can hold, by their place in the argument; the value itself may be a secret."""
    named = name or "the arguments"
    if depth > DEEPEST:
        yield f"{named} is nested more than {DEEPEST} levels deep; no option accepts that."
    elif isinstance(value, str):
        if "\0" in value:
            yield f"{named} contains a NUL byte; remove it."
        elif not _is_text(value):
            yield f"{named} contains a lone surrogate, which is not valid text; write it in UTF-8."
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


def _is_text(value: str) -> bool:
    """Bytes of a path that are not UTF-8 come as escapes and may go on as such."""
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _shown(key: Any) -> str:
    return str(key)[:60].encode("ascii", "backslashreplace").decode()


def _given() -> Any:
    """The arguments as they came, as far as Ansible lets us see them."""
    try:
        return {name: value for name, value in basic._load_params().items() if not str(name).startswith("_ansible_")}
    except Exception:  # of whatever kind: then there is no more to be said
        return {}


def fail(sentence: str) -> None:
    """End like fail_json, where there is no module yet."""
    sys.stdout.write(json.dumps({"failed": True, "changed": False, "msg": sentence}) + "\n")
    raise SystemExit(1)
