# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings of a job as an inventory gives them, read by the table of settings_table.py."""

from __future__ import annotations

import difflib
import json
from typing import Any, Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding, refusal_text
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import (
    ALIASES,
    HOST,
    NOT_SETTINGS,
    PROFILES,
    RUN,
    SETTINGS,
    TABLE,
    Setting,
    Settings,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_types import (
    SECRET,
    convert,
    is_unset,
    wanted,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.urls import NO_CREDENTIALS, masked


class SettingsError(ValueError):
    """All that is wrong with the settings, as findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__(refusal_text(self.findings))


def shown(setting: Setting, value: Any) -> str:
    """The value as a message may show it."""
    if setting.name == SECRET:
        return "(hidden)"
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__} that is nested without end or too long"
    text = masked(text)
    return text if len(text) <= 80 else text[:77] + "..."


WHERE = "\0"


class Problem(NamedTuple):
    """What is wrong on one host; WHERE in the text is where the hosts go that have it alike."""

    host: str
    text: str


def read_host(host: str, variables: Mapping[str, Any]) -> tuple[Settings, list[Problem]]:
    """(the settings that this host gives, problems); unset ones are left out."""
    given: Settings = {}
    problems: list[Problem] = []
    for name in sorted(variables):
        target = ALIASES.get(name, name)
        if not target.startswith("ddp_") or target in NOT_SETTINGS:
            continue
        setting = TABLE.get(target)
        if setting is None:
            problems.append(Problem(host, unknown(name)))
        elif not is_unset(variables[name]):
            try:
                given[target] = convert(setting, variables[name])
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                problems.append(Problem(host, refused(setting, name, variables[name], error)))
    return given, problems


def refused(setting: Setting, name: str, value: Any, error: Exception) -> str:
    told = setting.kind in ("dict", "range", "list") or str(error).startswith(("at most", "a NUL", NO_CREDENTIALS))
    reason = f" ({error})" if told else ""
    return f"{name} is {shown(setting, value)}{WHERE}{reason}; it must be {wanted(setting)}."


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, list(TABLE), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists all settings."
    return f"{name}{WHERE} is not a setting of nanochat.ddp; {hint}"


def _told(problems: Sequence[Problem], hosts: int) -> list[Finding]:
    """One finding for what several hosts have alike, as they do where a variable of their group is wrong."""
    having: dict[str, list[str]] = {}
    for problem in problems:
        having.setdefault(problem.text, []).append(problem.host)
    found = []
    for text, names in having.items():
        where = " on every host" if len(names) == hosts > 1 else " on " + ", ".join(names)
        host = names[0] if len(names) == 1 else ""
        found.append(finding("setting-refused", host, text.replace(WHERE, where).rstrip(".")))
    return found


def defaults(profile: str) -> Settings:
    """Every setting as it is when nothing is said but the profile."""
    values = {setting.name: setting.default for setting in SETTINGS}
    values.update(PROFILES[profile])
    values["ddp_profile"] = profile
    return values


def resolve(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Settings, dict[str, Settings]]:
    """(settings of the run, {host: settings of the host}); raises SettingsError with every problem of every host."""
    problems: list[Problem] = []
    given: dict[str, Settings] = {}
    for host, variables in hosts:
        given[host], wrong = read_host(host, variables)
        problems.extend(wrong)
    run_given, differing = _agree(given)
    if problems or differing:
        raise SettingsError(_told(problems, len(hosts)) + ([] if problems else differing))
    values = defaults(run_given.get("ddp_profile", "smoke"))
    values.update(run_given)
    if "ddp_restarts" not in run_given and not can_restart(values):
        values["ddp_restarts"] = 0
    run = {name: value for name, value in values.items() if TABLE[name].scope == RUN}
    of_host = {name: value for name, value in values.items() if TABLE[name].scope == HOST}
    each = {
        host: dict(of_host, **{name: value for name, value in own.items() if TABLE[name].scope == HOST})
        for host, own in given.items()
    }
    return run, each


def can_restart(values: Mapping[str, Any]) -> bool:
    """Whether a run of these settings goes on from where it was."""
    return bool(values["ddp_trainer_source"] == "ours" and values["ddp_resume"])


def told(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> set[str]:
    """The settings that somebody made, wherever."""
    return {name for host, variables in hosts for name in read_host(host, variables)[0]}


def _agree(given: Mapping[str, Mapping[str, Any]]) -> tuple[Settings, list[Finding]]:
    """The settings of the run, which every host must give alike."""
    agreed: Settings = {}
    problems: list[Finding] = []
    hosts = list(given)
    for setting in SETTINGS:
        if setting.scope != RUN:
            continue
        values = [given[host].get(setting.name) for host in hosts]
        other = next((at for at, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            seen = "{} is {} on {} but {} on {}; it belongs to the whole run: set it for the group".format(
                setting.name,
                shown(setting, values[0]) if values[0] is not None else "not set",
                hosts[0],
                shown(setting, values[other]) if values[other] is not None else "not set",
                hosts[other],
            )
            problems.append(finding("setting-refused", "", seen))
        elif values and values[0] is not None:
            agreed[setting.name] = values[0]
    return agreed, problems
