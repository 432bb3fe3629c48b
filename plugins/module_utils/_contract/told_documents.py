# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validates documents from hosts: their types, and every value used as a path, name, address, port or argument.

The plan for all hosts is made from each host's facts, so one host's data reaches the others' firewalls, folders and commands.
A deployed plan comes back from a host and decides which hosts the others contact.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Any, Callable, Collection, Dict, Iterator, List, Sequence, Tuple, Union, cast, get_type_hints

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of, items
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.probe import Probe
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.told import Untrue

DEEPEST = 20
MOST_PROCESSORS = 8192


def _matching(pattern: str, wanted: str) -> Callable[[Any], object]:
    def check(value: Any) -> object:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise told.refused(value, wanted)
        return value

    return check


def _interface(value: Any) -> object:
    """An address with its network, such as 192.168.1.10/24."""
    try:
        return ipaddress.ip_interface("" if "%" in str(value) else str(value))
    except ValueError:
        raise told.refused(value, "an address with its network") from None


def _processor(value: Any) -> int:
    return told.whole(value, 0, MOST_PROCESSORS)


def _local_port(value: Any) -> int:
    """One end of a range of local ports; the plan opens none below 1024."""
    return told.whole(value, 1, told.HIGHEST_PORT)


_nic = _matching(r"[^\s/\x00-\x1f\x7f-\x9f]{1,15}", "the name of a network interface")
_version = _matching(r"\d+\.\d+[0-9A-Za-z.+]{0,20}", "a version")
_word = _matching(r"[A-Za-z0-9_.@+-]{1,64}", "a word")

# Places of facts (* is every list element or value), and their checks unless unknown.
Rules = Tuple[Tuple[str, Callable[[Any], object]], ...]
FACTS: Rules = (
    ("base_dir", told.absolute_path),
    ("venv_dir", told.absolute_path),
    ("host.home", told.absolute_path),
    ("host.arch", _word),
    ("python.library", told.absolute_path),
    ("python.version", _version),
    ("python.candidates.*.executable", told.absolute_path),
    ("python.candidates.*.version", _version),
    ("cpu.allowed.*", _processor),
    ("cpu.fast.*", _processor),
    ("nics.*.name", _nic),
    ("nics.*.ipv4.*", _interface),
    ("nics.*.ipv6.*", _interface),
    ("ephemeral.low", _local_port),
    ("ephemeral.high", _local_port),
    ("sudo", _matching("root|passwordless|none", "root, passwordless or none")),
    ("run.lineage.data.id", told.plain_name),
    ("base_run.lineage.data.id", told.plain_name),
    ("finished.*.run", told.plain_name),
    ("run.cores.*.*", _processor),
    ("usage.graphical.*", _word),
)
PLAN: Rules = (
    ("run", told.plain_name),
    ("data_ports.*", told.port),
    ("master.address", told.address),
    ("master.port", told.port),
    ("nodes.*.rank", lambda value: told.whole(value, 0, 65535)),
    ("nodes.*.address", told.address),
    ("nodes.*.peers.*", told.address),
    ("nodes.*.session", told.plain_name),
    ("nodes.*.keeper_port", told.port),
    ("timeout_seconds", lambda value: told.whole(value, 1, 1_000_000)),
)


def checked_probe(found: Any) -> Probe:
    """A host's validated facts; raises Untrue with the place of the first invalid one."""
    _check(found, Probe, FACTS)
    return cast(Probe, found)


def believed_plans(found: Sequence[Any], hosts: Collection[str]) -> List[Plan]:
    """The valid plans among those that hosts sent back that include one of these hosts; most frequent first.

    A host of a plan may have left the inventory since; it is not contacted.
    """
    plans: List[Plan] = []
    for plan in found:
        with contextlib.suppress(Untrue):
            _check(plan, Plan, PLAN)
            nodes = items(plan, "nodes")
            if plan.get("run") and any(node.get("host") in hosts for node in nodes):
                plans.append(cast(Plan, plan))
    digests = [digest_of(plan) for plan in plans]
    return [plan for dummy, plan in sorted(zip(digests, plans), key=lambda pair: -digests.count(pair[0]))]


def _check(found: Any, kind: Any, rules: Rules) -> None:
    _check_kind(found, kind, "")
    for place, check in rules:
        for value in _at(found, place.split(".")):
            try:
                check(value)
            except Untrue as why:
                raise Untrue("its %s: %s" % (place, why)) from None


def _at(value: Any, place: Any) -> Iterator[Any]:
    """All known values at a place."""
    if value is None:
        return
    if not place:
        yield value
    elif place[0] == "*":
        for one in _elements(value):
            yield from _at(one, place[1:])
    elif isinstance(value, dict):
        yield from _at(value.get(place[0]), place[1:])


def _elements(value: Any) -> Collection[Any]:
    """The members of a list or dictionary; none of any other value."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_kind(value: Any, kind: Any, place: str, depth: int = 0) -> None:
    """Whether a value has the type in the contract; missing facts are the reader's concern."""
    origin, parts = getattr(kind, "__origin__", None), list(getattr(kind, "__args__", ()))
    if depth > DEEPEST:
        raise Untrue("its %s is nested too deeply; %s" % (place, told.STILL))
    if origin is Union:
        if value is not None:
            _check_kind(value, parts[0], place, depth)
    elif origin in (list, dict) and isinstance(value, origin):
        for one in _elements(value):
            _check_kind(one, parts[-1], place + ".*", depth + 1)
    elif hasattr(kind, "__total__") and isinstance(value, dict):
        hints: Dict[str, Any] = get_type_hints(kind)
        for name in set(value) & set(hints):
            _check_kind(value[name], hints[name], (place + "." + name).lstrip("."), depth + 1)
    elif not _is_plain(value, kind, place, depth):
        raise Untrue("its %s: %s" % (place or "answer", told.refused(value, "something else")))


def _is_plain(value: Any, kind: Any, place: str, depth: int) -> bool:
    """Whether a value is a plain value of its type; of `object`, only numbers are checked."""
    if kind is object:
        for one in _elements(value):
            _check_kind(one, object, place + ".*", depth + 1)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_number = abs(value) < 2**63  # false for infinity and NaN
        return is_number and (kind in (object, float) or (kind is int and isinstance(value, int)))
    return kind is object or (kind in (str, bool) and isinstance(value, kind))
