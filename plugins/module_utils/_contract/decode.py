# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decodes a host's documents by their types, each once where it enters the controller (docs/trust.md).

The types are the TypedDicts of the contract, with the types of values.py for paths, names, addresses, ports and times.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import (
    Annotated,
    Any,
    Collection,
    Dict,
    List,
    Optional,
    Sequence,
    Type,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from . import values
from .document import digest_of
from .validate import STILL, InvalidHostData, refused

Decoded = TypeVar("Decoded")
DEEPEST = 20
UNIONS = (Union, getattr(types, "UnionType", Union))  # Optional[x], and x | None since Python 3.10


def decode(kind: Type[Decoded], value: Any, partial: bool = False) -> Decoded:
    """The document; raises InvalidHostData with the place of the first value that does not fit.

    A missing key is null where its type allows that. In a partial document, which another version may have written, any may be missing.
    """
    return cast(Decoded, _decode(kind, value, "", partial))


def _decode(kind: Any, value: Any, place: str, partial: bool) -> Any:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        found = _decode(parts[0], value, place, partial)
        try:
            return functools.reduce(lambda one, check: check(one), parts[1:], found)
        except InvalidHostData as why:
            raise InvalidHostData("its %s: %s" % (place, why)) from None
    if origin in UNIONS:
        return None if value is None else _decode(parts[0], value, place, partial)
    if origin is list and isinstance(value, list):
        return [_decode(parts[0], one, place + ".*", partial) for one in value]
    if origin is dict and isinstance(value, dict):
        return {_text(name): _decode(parts[1], one, place + ".*", partial) for name, one in value.items()}
    if hasattr(kind, "__required_keys__") and isinstance(value, dict):
        return _keys(kind, value, place, partial)
    if kind is object or _is_plain(kind, value):
        return _plain(value, place, 0)
    raise InvalidHostData("its %s: %s" % (place or "answer", refused(value, "something else")))


def _keys(kind: Any, value: Dict[str, Any], place: str, partial: bool) -> Dict[str, Any]:
    """The values of a section; an unknown key may hold anything plain."""
    hints = _hints(kind)
    unknown = {_text(name): _plain(one, place + ".*", 0) for name, one in value.items() if name not in hints}
    known = {
        name: _decode(own, value[name], (place + "." + name).lstrip("."), partial)
        for name, own in hints.items()
        if name in value
    }
    missing = [] if partial else sorted(kind.__required_keys__ - value.keys())
    for name in missing:
        if get_origin(hints[name]) not in UNIONS:
            raise InvalidHostData("its %s is missing; %s" % ((place + "." + name).lstrip("."), STILL))
    return {**dict.fromkeys(missing), **unknown, **known}


@functools.cache
def _hints(kind: Any) -> Dict[str, Any]:
    return get_type_hints(kind, localns=vars(values), include_extras=True)


def _is_plain(kind: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float or (kind is int and isinstance(value, int)):
        return _is_number(value)
    return kind is str and isinstance(value, str)


def _plain(value: Any, place: str, depth: int) -> Any:
    """A value of any shape, with null instead of numbers that nothing can be computed with."""
    if depth > DEEPEST:
        raise InvalidHostData("its %s is nested too deeply; %s" % (place, STILL))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(name): _plain(one, place + ".*", depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, place + ".*", depth + 1) for one in value]
    return value if isinstance(value, bool) or _is_number(value) else None


def _is_number(value: Any) -> bool:
    """Whether it is neither infinite nor NaN, and what is computed with two such numbers is neither."""
    return isinstance(value, (int, float)) and abs(value) < (2**63 if isinstance(value, int) else 1e50)


def _text(value: Any) -> str:
    """A text without lone surrogates, which no file can hold."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


class DeployedNode(TypedDict):
    """A node, as far as the doctor needs it."""

    host: str
    rank: values.Rank
    address: Optional[values.Address]
    peers: Optional[List[values.Address]]
    session: Optional[values.PlainName]
    nic: Optional[str]


class DeployedMaster(TypedDict):
    """Where the ranks met."""

    host: str
    address: Optional[values.Address]
    port: values.Port


class DeployedPorts(TypedDict):
    """Where the ranks listened."""

    low: values.Port
    high: values.Port


class DeployedPlan(TypedDict):
    """A plan that a host sent back, as far as the doctor needs it; it may be of another version."""

    run: values.PlainName
    nodes: List[DeployedNode]
    master: DeployedMaster
    data_ports: DeployedPorts
    timeout_seconds: Optional[values.Timeout]


def believed_plans(found: Sequence[Any], hosts: Collection[str]) -> List[DeployedPlan]:
    """The valid plans among those that hosts sent back that include one of these hosts; most frequent first.

    A host of a plan may have left the inventory since; it is not contacted.
    """
    plans: List[DeployedPlan] = []
    for one in found:
        with contextlib.suppress(InvalidHostData):
            plan = decode(DeployedPlan, one)
            plans += [plan] if any(node["host"] in hosts for node in plan["nodes"]) else []
    digests = [digest_of(plan) for plan in plans]
    return [plan for dummy, plan in sorted(zip(digests, plans), key=lambda pair: -digests.count(pair[0]))]
