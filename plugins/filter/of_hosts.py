# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One variable of several hosts, for filters and judgements that compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

NOTHING = object()


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, default: Any = NOTHING) -> dict[str, Any]:
    """Host -> its value of the variable, or the default. Without a default, a variable that no host has is a mistake."""
    found = {host: hostvars[host].get(name, default) for host in hosts}
    if found and all(value is NOTHING for value in found.values()):
        raise AnsibleFilterError(f"none of {', '.join(found)} has a variable {name}; register or set it before")
    return {host: None if value is NOTHING else value for host, value in found.items()}


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"of_hosts": of_hosts}
