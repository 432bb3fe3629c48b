# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that give plays and roles a value: of several hosts, of their runs, of a measurement, also as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..module_utils._contract import validate
from ..module_utils._contract.document import section
from ..module_utils._contract.settings_table import find
from ..module_utils._kit.printable import printable
from ..module_utils._run import table as run_table
from ..module_utils._run.state import RUNNING
from ..plugin_utils._display.terminal import width
from ..plugin_utils._runs import command_on, one_run, seen_of, whole_path, why_no_answer

if TYPE_CHECKING:
    from ..module_utils._contract.plan import Node
    from ..module_utils._preflight.peer_check import LinkTry


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, default: Any = None) -> dict[str, Any]:
    """Host -> its value of the variable, or the default."""
    found = {host: hostvars[host].get(name, default) for host in hosts}
    for host, value in found.items():
        # Reading what else Ansible adds to a result that took too long is a deprecation warning.
        late = value.get("timedout") if isinstance(value, Mapping) else None
        if isinstance(late, Mapping):
            found[host] = {**value, "timedout": {"period": late.get("period")}}
    return found


def found_runs(hosts: Iterable[str], hostvars: Mapping[str, object]) -> dict[str, Any]:
    """Host -> what the role find_run learned of the run there, whatever happened to the task, with the name of its newest run."""
    hosts = list(hosts)
    newest, again = (of_hosts(hosts, hostvars, f"__find_run_{name}", {}) for name in ("newest", "again"))
    return {
        host: {
            **(again[host] if again[host] and not again[host].get("skipped") else newest[host]),
            "newest_run": section(newest[host], "run").get("run") or "",
        }
        for host in hosts
    }


def results_dir(given: str) -> str:
    """The folder of results: that of ddp_results_dir, or its default."""
    return whole_path(given or find("ddp_results_dir").default)


def shard_chain(
    servers: Mapping[str, object], links: Mapping[str, Mapping[str, list[LinkTry]]], nodes: Iterable[Node], first: str
) -> list[dict[str, Any]]:
    """The shard servers of the hosts in the order in which these hand files on: the first host, then the fastest, Wi-Fi last."""

    def slowness(node: Node) -> tuple[bool, bool, float]:
        wifi = str(node.get("nic") or "").startswith("wl")
        tried = (links.get(node["host"]) or {}).get("links") or []
        fastest = max((rate for link in tried if (rate := link["bandwidth_mbit"])), default=math.inf)
        return node["host"] != first, wifi, -fastest

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


def status_table(results: Any, as_json: bool = False) -> str:
    """The status screen; the same for programs."""
    if as_json:
        return json.dumps(run_table.status_data(seen_of(results)), indent=2, sort_keys=True)
    return printable(run_table.status_screen(seen_of(results), width()))


def last_lines(results: Any, hostvars: Mapping[str, Any]) -> str:
    """The last lines of all logs, and the commands that follow those of the running ranks."""
    seen = seen_of(results)
    wide = max(len(one.host) for one in seen)
    said, follow = [], []
    for one in seen:
        nothing = one.problem or "no log yet: " + (one.run["log"] or "no run was started here")
        said += [f"{one.host:<{wide}} | {line}" for line in one.run["last_lines"] or [nothing]]
        if one.run["state"] == RUNNING:
            follow.append("  " + command_on(one.host, hostvars[one.host], ["tail", "-F", one.run["log"]]))
    return printable("\n".join([*said, *(["To follow them:", *follow] if follow else [])]))


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "of_hosts": of_hosts,
            "found_runs": found_runs,
            "one_run": one_run,
            "results_dir": results_dir,
            "shard_chain": shard_chain,
            "status_table": status_table,
            "last_lines": last_lines,
            "why_no_answer": why_no_answer,
        }
