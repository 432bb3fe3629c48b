# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads a job's settings from inventory variables, using the rows of settings_table.py."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any, Dict, FrozenSet, Mapping, NamedTuple, Sequence

from . import settings_table
from .findings import Finding, finding, refusal_text
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
    profiles,
    rows,
)
from .settings_types import FALSE, SECRET, TRUE, convert, is_unset, wanted
from .urls import NO_CREDENTIALS, masked

# Converted values by the names of their settings.
Values = Dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A job's settings as the user wrote them, with the profile's defaults; immutable."""

    run: RunSettings
    hosts: Mapping[str, HostSettings]
    given: FrozenSet[str]  # the settings that the user wrote, by inventory name


class SettingsError(ValueError):
    """All errors in the settings, as findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__(refusal_text(self.findings))


def shown(setting: Setting, value: Any) -> str:
    """The value as shown in a message."""
    if value is None:
        return "not set"
    if setting.name == SECRET:
        return "(hidden)"
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__} that is nested too deeply or too long"
    text = masked(text)
    return text if len(text) <= 80 else text[:77] + "..."


WHERE = "\0"


class Problem(NamedTuple):
    """A problem of one host; WHERE in the text stands for the hosts that share it."""

    host: str
    text: str


def read_host(host: str, variables: Mapping[str, Any]) -> tuple[Values, list[Problem]]:
    """(this host's settings, problems); unset ones are omitted."""
    given: Values = {}
    problems: list[Problem] = []
    table = rows()
    for name in sorted(variables):
        target = ALIASES.get(name, name)
        if not target.startswith(PREFIX) or target in NOT_SETTINGS:
            continue
        setting = table.get(target)
        if target in REMOVED_SETTINGS:
            if not is_ignored(target, variables[name]):
                instead = REMOVED_SETTINGS[target].instead
                problems.append(Problem(host, f"{name}{WHERE} is no longer a setting: {instead}."))
        elif setting is None:
            problems.append(Problem(host, unknown(name)))
        elif not is_unset(variables[name]):
            try:
                given[target] = convert(setting, variables[name])
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                problems.append(Problem(host, refused(setting, name, variables[name], error)))
    return given, problems


def is_ignored(name: str, value: Any) -> bool:
    """Whether a removed setting is empty, or asks for what is done now anyway."""
    word = str(value).strip().lower()
    word = "true" if word in TRUE else "false" if word in FALSE else word
    return is_unset(value) or word in REMOVED_SETTINGS[name].ignored


def refused(setting: Setting, name: str, value: Any, error: Exception) -> str:
    if str(value) in setting.gone:
        return f"{name} is {shown(setting, value)}{WHERE}, which is no longer a choice: {setting.gone[str(value)]}."
    explained = setting.kind in ("dict", "list") or str(error).startswith(("at most", "a NUL", NO_CREDENTIALS))
    reason = f" ({error})" if explained else ""
    return f"{name} is {shown(setting, value)}{WHERE}{reason}; it must be {wanted(setting)}."


def unknown(name: str) -> str:
    # Without the prefix, which makes all names alike.
    near = difflib.get_close_matches(name[len(PREFIX) :], [row.field for row in rows().values()], n=1, cutoff=0.6)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else "docs/settings.md lists all settings."
    return f"{name}{WHERE} is not a setting of nanochat.ddp; {hint}"


def _merged(problems: Sequence[Problem], hosts: int) -> list[Finding]:
    """One finding for a problem that several hosts share, for example a wrong group variable."""
    having: dict[str, list[str]] = {}
    for problem in problems:
        having.setdefault(problem.text, []).append(problem.host)
    found = []
    for text, names in having.items():
        where = " on every host" if len(names) == hosts > 1 else " on " + ", ".join(names)
        host = names[0] if len(names) == 1 else ""
        found.append(finding("setting-refused", host, text.replace(WHERE, where).rstrip(".")))
    return found


def defaults(profile: str) -> Values:
    """All settings if the user sets only the profile."""
    values = {name: row.default for name, row in rows().items()}
    return {**values, **profiles()[profile], "ddp_profile": profile}


def resolve(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> Asked:
    """A job's settings; raises SettingsError with all problems of all hosts."""
    problems: list[Problem] = []
    given: dict[str, Values] = {}
    for host, variables in hosts:
        given[host], wrong = read_host(host, variables)
        problems.extend(wrong)
    run_given, differing = _agree(given)
    if problems or differing:
        raise SettingsError(_merged(problems, len(hosts)) + ([] if problems else differing))
    values = defaults(run_given.get("ddp_profile", "smoke"))
    each = {host: settings_table.HostSettings(**_fields({**values, **own}, HOST)) for host, own in given.items()}
    return Asked(
        settings_table.RunSettings(**_fields({**values, **run_given}, RUN)),
        each,
        frozenset(name for own in given.values() for name in own),
    )


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
