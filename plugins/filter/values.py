# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that give plays and roles a value: of several hosts, of their runs, of a setting, of a measurement, also as text."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils._contract import validate
from ..module_utils._contract.document import section
from ..module_utils._contract.settings import defaults
from ..module_utils._kit import words
from ..module_utils._kit.printable import printable
from ..module_utils._preflight.predict import Outlook, comparison_text
from ..module_utils._run import table as run_table
from ..module_utils._run.health import UNSEEN, Seen, without_cpu
from ..module_utils._run.state import RUNNING
from ..plugin_utils._runs import one_run

NOTHING = object()


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, default: Any = NOTHING) -> dict[str, Any]:
    """Host -> its value of the variable, or the default. Without a default, a variable that no host has is an error."""
    found = {host: hostvars[host].get(name, default) for host in hosts}
    if found and all(value is NOTHING for value in found.values()):
        raise AnsibleFilterError(f"none of {', '.join(found)} has a variable {name}; register or set it before")
    for host, value in found.items():
        # Reading what else Ansible adds to a result that took too long is a deprecation warning.
        late = value.get("timedout") if isinstance(value, Mapping) else None
        if isinstance(late, Mapping):
            found[host] = {**value, "timedout": {"period": late.get("period")}}
    return {host: None if value is NOTHING else value for host, value in found.items()}


def found_runs(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
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


def setting(given: Any, name: str) -> Any:
    """The inventory's value; if empty, the default."""
    return defaults("smoke")[name] if given in (None, "") else given


def shard_chain(
    servers: Mapping[str, Any], links: Mapping[str, Any], nodes: Iterable[Any], first: str
) -> list[dict[str, Any]]:
    """The shard servers of the hosts in the order in which these hand files on: the first host, then the fastest, Wi-Fi last."""

    def slowness(node: Mapping[str, Any]) -> tuple[bool, bool, float]:
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


def width() -> int:
    """The terminal's width as the display found it, without its indentation; 0 if there is none."""
    columns = os.environ.get("NANOCHAT_DDP_COLUMNS", "")
    return max(0, int(columns) - 2) if columns.isdigit() else 0


def why_no_answer(result: Mapping[str, Any]) -> str:
    """Why a task's result is missing, in one line."""
    if "timedout" in result:
        return f"it did not answer within {(result['timedout'] or {}).get('period', 'some')} s; check that it is on and not frozen"
    return words.plain_reason(str(result.get("msg") or "it did not answer")).splitlines()[0]


def seen_of(results: Mapping[str, Any]) -> list[Seen]:
    """Several hosts as they were seen last, from their results, whatever happened to the task."""
    found = []
    for host, result in ((host, result or {}) for host, result in results.items()):
        run = {**UNSEEN, **(result.get("run") or {})}
        reachable = not result.get("unreachable") and result.get("reachable", True)
        more: dict[str, Any] = {name: result.get(name) for name in ("verdict", "sentence", "newest_run")}
        problem = None if result.get("run") else why_no_answer(result)
        silent = 0.0 if reachable else math.inf
        found.append(Seen(str(host), run, silent=silent, without_cpu=without_cpu(run), problem=problem, **more))
    return found


def closing_table(results: Any, prediction: Outlook | None = None) -> str:
    """The closing table, followed by the prediction compared with the result."""
    seen = seen_of(results)
    beside = comparison_text(prediction, {one.host: one.run for one in seen}) if prediction else ""
    return printable("\n".join([run_table.closing_table(seen, width()), *([beside] if beside else [])]))


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
            follow.append("  " + by_hand(one.host, hostvars[one.host], ["tail", "-F", one.run["log"]]))
    return printable("\n".join([*said, *(["To follow them:", *follow] if follow else [])]))


def by_hand(host: str, known: Mapping[str, Any], argv: list[str]) -> str:
    """The command line for a person who runs a program on a host, by the variables with which Ansible reaches it."""
    if str(known.get("ansible_connection", "ssh")).endswith("local"):
        return shlex.join(argv)
    key = known.get("ansible_ssh_private_key_file") or known.get("ansible_private_key_file")
    port, user = known.get("ansible_port"), known.get("ansible_user")
    more = [str(known[name]) for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args") if known.get(name)]
    target = f"{user}@{known.get('ansible_host') or host}" if user else str(known.get("ansible_host") or host)
    options = [*(["-i", str(key)] if key else []), *(["-p", str(port)] if port else []), *shlex.split(" ".join(more))]
    return shlex.join(["ssh", *options, target, shlex.join(argv)])


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {
            "of_hosts": of_hosts,
            "found_runs": found_runs,
            "one_run": one_run,
            "setting": setting,
            "shard_chain": shard_chain,
            "status_table": status_table,
            "last_lines": last_lines,
            "why_no_answer": why_no_answer,
        }
