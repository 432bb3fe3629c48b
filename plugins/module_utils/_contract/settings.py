# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the settings of all hosts by the rows of settings_table.py, and refuses what is wrong with every problem at once."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import json
import math
import re
from typing import Any, Callable, Dict, FrozenSet, Mapping, Sequence

from . import settings_table
from .findings import Finding, PlanError, finding
from .settings_table import (
    ALIASES,
    HOST,
    NOT_SETTINGS,
    PREFIX,
    REMOVED_SETTINGS,
    RUN,
    HostSettings,
    RunSettings,
    Setting,
    find,
    rows,
)
from .validate import NO_CREDENTIALS, has_credentials, masked

# Converted values by the names of their settings.
Values = Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A job's settings as the user wrote them, with the profile's defaults; immutable."""

    run: RunSettings
    hosts: Mapping[str, HostSettings]
    given: FrozenSet[str]  # the settings that the user wrote, by inventory name


def shown(setting: Setting, value: Any) -> str:
    """The value as shown in a message."""
    if value is None:
        return "not set"
    if setting.name == SECRET:
        return "(hidden)"
    try:
        text = masked(json.dumps(value, default=str))
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__} that is nested too deeply or too long"
    return text if len(text) <= 80 else text[:77] + "..."


WHERE = "\0"  # in a problem, stands for the hosts that share it


def read_host(variables: Mapping[str, object]) -> tuple[Values, list[str]]:
    """(a host's settings, problems); unset ones are omitted."""
    given: Values = {}
    problems: list[str] = []
    for name in sorted(variables):
        target, value = ALIASES.get(name, name), variables[name]
        if not target.startswith(PREFIX) or target in NOT_SETTINGS:
            continue
        is_set = value is not None and (not isinstance(value, str) or value.strip() != "")
        if removed := REMOVED_SETTINGS.get(target):
            instead, *ignored = removed
            word = str(value).strip().lower().removesuffix(".0")
            truth = "true" if word in TRUE else "false" if word in FALSE else word
            if is_set and {word, truth}.isdisjoint(ignored):
                problems.append(f"{name}{WHERE} is no longer a setting: {instead}.")
        elif target not in rows():
            # Without the prefix, which makes all names alike.
            fields = [row.field for row in rows().values()]
            near = difflib.get_close_matches(name[len(PREFIX) :], fields, n=1, cutoff=0.6)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "docs/settings.md lists all settings."
            problems.append(f"{name}{WHERE} is not a setting of nanochat.ddp; {hint}")
        elif is_set:
            row = find(target)
            try:
                given[target] = convert(row, value)
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                explained = row.kind in ("dict", "list") or str(error).startswith(("at most", "a NUL", NO_CREDENTIALS))
                reason = f" ({error})" if explained else ""
                problems.append(f"{name} is {shown(row, value)}{WHERE}{reason}; it must be {wanted(row)}.")
    return given, problems


def defaults(profile: str) -> Values:
    """All settings if the user sets only the profile."""
    values = {name: getattr(row, profile) if row.from_profile else row.default for name, row in rows().items()}
    return {**values, "ddp_profile": profile}


def resolve(hosts: Sequence[tuple[str, Mapping[str, object]]]) -> Asked:
    """A job's settings; raises PlanError with all problems of all hosts."""
    if not hosts:
        seen = "There are no hosts to plan for; the inventory's group trainers is empty"
        raise PlanError([finding("setting-refused", "", seen)])
    given: dict[str, Values] = {}
    having: dict[str, list[str]] = {}  # the hosts with each problem
    for host, variables in hosts:
        given[host], problems = read_host(variables)
        for problem in problems:
            having.setdefault(problem, []).append(host)
    run_given, differing = _agree(given)
    found = []
    for problem, names in having.items():
        # A wrong group variable is a problem of all.
        where = " on every host" if len(names) == len(hosts) > 1 else " on " + ", ".join(names)
        host = names[0] if len(names) == 1 else ""
        found.append(finding("setting-refused", host, problem.replace(WHERE, where).rstrip(".")))
    if found or differing:
        raise PlanError(found or differing)
    values = defaults(run_given.get("ddp_profile", "smoke"))
    each = {host: settings_table.HostSettings(**_fields({**values, **own}, HOST)) for host, own in given.items()}
    run = settings_table.RunSettings(**_fields({**values, **run_given}, RUN))
    return Asked(run, each, frozenset(name for own in given.values() for name in own))


def _fields(values: Values, scope: str) -> Values:
    """The values of one scope by field name."""
    return {row.field: values[name] for name, row in rows().items() if row.scope == scope}


def _agree(given: Mapping[str, Values]) -> tuple[Values, list[Finding]]:
    """The run's settings, which must be the same on every host."""
    agreed: Values = {}
    problems: list[Finding] = []
    hosts = list(given)
    for setting in rows().values():
        if setting.scope != RUN:
            continue
        values = [given[host].get(setting.name) for host in hosts]
        other = next((at for at, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            one, two = (f"{shown(setting, values[at])} on {hosts[at]}" for at in (0, other))
            seen = f"{setting.name} is {one} but {two}; it applies to the whole run: set it for the group"
            problems.append(finding("setting-refused", "", seen))
        elif values and values[0] is not None:
            agreed[setting.name] = values[0]
    return agreed, problems


# The value of a setting, from a file or from text on the command line

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
SECRET = "ddp_secret_env"


def _as_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError("not whole")
    return int(value)


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError("not a finite number")
    return float(value)


def _as_bool(value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in (*TRUE, *FALSE):
        raise ValueError("neither true nor false")
    return word in TRUE


def _as_str(value: Any) -> str:
    if isinstance(value, (bool, list, dict)):
        raise ValueError("not a word")
    return str(value).strip()


def _as_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        # From -e, in JSON or with single quotes.
        text = value.strip()
        for parse in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = parse(text)
                break
        else:
            raise ValueError("not a list")
    elif isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or any(isinstance(item, (list, dict)) for item in value):
        raise ValueError("not a list of words")
    return tuple(str(item) for item in value)


def _as_dict(value: Any) -> dict[str, str]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, Mapping):
        raise ValueError("not a dictionary")
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{str(name)!r} is not a valid environment variable name")
        if isinstance(item, (list, dict)):
            raise ValueError("a value is a list or a dictionary; quote it exactly as the process should see it")
    # As the inventory has it: YAML's yes becomes true again.
    words = {None: "", True: "true", False: "false"}
    return {
        str(name): words[item] if item is None or isinstance(item, bool) else str(item) for name, item in value.items()
    }


# By kind, how a value is read, and what it must be.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_as_int, "an integer"),
    "float": (_as_float, "a number"),
    "bool": (_as_bool, "true or false"),
    "str": (_as_str, "a string"),
    "list": (_as_list, "a list"),
    "dict": (_as_dict, "a dictionary of environment variables"),
}


def wanted(setting: Setting) -> str:
    """The accepted values, in words."""
    if setting.choices:
        return " or ".join([", ".join(setting.choices[:-1]), setting.choices[-1]])
    least = "" if setting.low is None else f" of at least {setting.low:g}"
    return setting.takes or KINDS[setting.kind][1] + least


def convert(setting: Setting, value: Any) -> Any:
    """The converted value; raises ValueError if invalid."""
    if value is False and "off" in setting.choices:
        # YAML reads a bare off as false.
        return "off"
    result = KINDS[setting.kind][0](value)
    if setting.choices and result not in setting.choices:
        raise ValueError("not a choice")
    if setting.pattern and not re.fullmatch(setting.pattern, result):
        raise ValueError("malformed")
    if setting.low is not None and result < setting.low:
        raise ValueError("too small")
    if setting.kind in ("int", "float"):
        most = setting.most or 2**31  # that of rows without one
        if result > most:
            raise ValueError(f"at most {most}")
    # Values of variables are checked where they are written.
    texts = [result] if isinstance(result, str) else list(result) if setting.kind in ("list", "dict") else []
    if any(re.search("[\0\ud800-\udc7f\udd00-\udfff]", text) for text in texts):
        raise ValueError("a NUL byte or a lone surrogate, which paths and names cannot contain")
    if setting.name != SECRET and any(map(has_credentials, result.values() if setting.kind == "dict" else texts)):
        raise ValueError(NO_CREDENTIALS)
    return result
