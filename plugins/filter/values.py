# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that give plays and roles a value: of several hosts, of their runs, of a setting, of a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils._contract import validate
from ..module_utils._contract.decode import believed_plans
from ..module_utils._contract.document import section
from ..module_utils._contract.settings import defaults
from ..module_utils._preflight.links import ways_to
from ..plugin_utils._runs import age, newest_model, one_run

NOTHING = object()


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, default: Any = NOTHING) -> dict[str, Any]:
    """Host -> its value of the variable, or the default. Without a default, a variable that no host has is an error."""
    found = {host: hostvars[host].get(name, default) for host in hosts}
    if found and all(value is NOTHING for value in found.values()):
        raise AnsibleFilterError(f"none of {', '.join(found)} has a variable {name}; register or set it before")
    return {host: None if value is NOTHING else without_frame(value) for host, value in found.items()}


def without_frame(value: Any) -> Any:
    """A result without what Ansible adds to one that took too long: reading it is a deprecation warning."""
    late = value.get("timedout") if isinstance(value, Mapping) else None
    return {**value, "timedout": {"period": late.get("period")}} if isinstance(late, Mapping) else value


def setting(given: Any, name: str) -> Any:
    """The inventory's value; if empty, the default."""
    return defaults("smoke")[name] if given in (None, "") else given


def plain_name(name: Any) -> str:
    """The name, if it is a plain file or folder name."""
    try:
        return validate.plain_name(name)
    except validate.InvalidHostData as why:
        raise AnsibleFilterError(str(why)) from None


def plans_of_runs(results: Mapping[str, Any], hosts: Iterable[str]) -> list[Any]:
    """The valid plans returned by run_info with the runs: the one that most hosts have first, then that of the newest training."""
    told = [result for result in results.values() if result.get("plan") is not None and result.get("run")]
    newest = sorted(told, key=lambda result: age(result["run"]), reverse=True)
    return believed_plans([result["plan"] for result in newest], list(hosts))


def shard_chain(
    servers: Mapping[str, Any], links: Mapping[str, Any], nodes: Iterable[Any], first: str
) -> list[dict[str, Any]]:
    """The shard servers of the hosts in the order in which these hand files on: the first host, then the fastest, Wi-Fi last."""

    def slowness(node: Mapping[str, Any]) -> tuple[bool, bool, float]:
        wifi = str(node.get("nic") or "").startswith("wl")
        return node["host"] != first, wifi, -fastest_link(links.get(node["host"]))

    # The plan knows the addresses; only the port is the server's.
    return [
        {"host": node["host"], "address": node["address"] or "127.0.0.1", "port": port}
        for node in sorted(nodes, key=slowness)
        if (port := port_of(servers.get(node["host"])))
    ]


def port_of(serving: Any) -> int | None:
    """The port of a host's shard server; None if it has none."""
    try:
        return validate.port(section(serving, "server").get("port"))
    except validate.InvalidHostData:
        return None


def fastest_link(result: Any) -> float:
    """In Mbit/s, of what peer_check returned on a host; infinite if it measured none."""
    links = (result or {}).get("links") or []
    return max((rate for link in links if (rate := link["bandwidth_mbit"])), default=math.inf)


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "of_hosts": of_hosts,
            "one_run": one_run,
            "newest_model": newest_model,
            "setting": setting,
            "plain_name": plain_name,
            "believed_plans": plans_of_runs,
            "ways_to": ways_to,
            "shard_chain": shard_chain,
        }
