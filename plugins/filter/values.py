# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that give plays and roles a value: of several hosts, of a setting, of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.command_line import flag_words
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import defaults
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import find
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_types import convert
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told_documents import believed_plans
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.evidence import peers_of
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.measured import best_of_all, with_link
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.checkout import problems

NOTHING = object()


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, default: Any = NOTHING) -> dict[str, Any]:
    """Host -> its value of the variable, or the default. Without a default, a variable that no host has is an error."""
    found = {host: hostvars[host].get(name, default) for host in hosts}
    if found and all(value is NOTHING for value in found.values()):
        raise AnsibleFilterError(f"none of {', '.join(found)} has a variable {name}; register or set it before")
    return {host: None if value is NOTHING else value for host, value in found.items()}


def setting(given: Any, name: str) -> Any:
    """The inventory's value; if empty, the default."""
    return defaults("smoke")[name] if given in (None, "") else given


def environment(value: Any) -> dict[str, str]:
    """A setting of environment variables as names and texts, from an inventory or as text from -e."""
    try:
        return dict(convert(find("ddp_secret_env"), value))
    except (ValueError, TypeError):
        # It may contain secrets.
        raise AnsibleFilterError("ddp_secret_env must be a dictionary of environment variables") from None


def plain_name(name: Any) -> str:
    """The name, if it is a plain file or folder name."""
    try:
        return told.plain_name(name)
    except told.Untrue as why:
        raise AnsibleFilterError(str(why)) from None


def preflight_peers(plan: Any, answers: Mapping[str, Any], host: str) -> list[dict[str, object]]:
    """The responders of the other hosts, from the next rank on."""
    return peers_of(plan, {name: answer for name, answer in answers.items() if isinstance(answer, Mapping)}, host)


def checkout_problems(folder: str, flags: Mapping[str, object], script: str) -> dict[str, list[str]]:
    """Reasons why a checkout's script cannot be started with these flags."""
    return problems(folder, [f"--{name}" for name in flags], script)


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "of_hosts": of_hosts,
            "setting": setting,
            "environment": environment,
            "plain_name": plain_name,
            "flag_words": flag_words,
            "believed_plans": believed_plans,
            "best_measured": best_of_all,
            "measured_link": with_link,
            "preflight_peers": preflight_peers,
            "checkout_problems": checkout_problems,
        }
