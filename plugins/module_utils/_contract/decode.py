# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decodes a host's documents by their types, each once where it enters the controller (docs/trust.md).

The types are the TypedDicts of the contract, with the types of single values below, each with its check, for paths, names, addresses,
ports and times. Files for hosts import those for type checkers only.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Optional, TypedDict, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from . import validate
from .document import Document, digest_of, section
from .validate import STILL, InvalidHostData, refused

Decoded = TypeVar("Decoded")
DEEPEST = 20
UNIONS = (Union, getattr(types, "UnionType", Union))  # Optional[x], and x | None since Python 3.10
NotRequired = getattr(typing, "NotRequired", Optional)  # since Python 3.11, so on every controller


def _matching(pattern: str, wanted: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not re.fullmatch(pattern, value):
            raise refused(value, wanted)
        return str(value)

    return check


def _within(low: float, high: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not low <= value <= high:
            raise refused(value, "a number from %g to %g" % (low, high))
        return value

    return check


def _interface(value: Any) -> str:
    """An address with its network, such as 192.168.1.10/24."""
    try:
        ipaddress.ip_interface("" if "%" in value else value)
    except ValueError:
        raise refused(value, "an address with its network") from None
    return str(value)


def _lineage(parts: Any) -> Any:
    """The id of the data is the name of a folder."""
    found = section(parts, "data").get("id")
    if found is not None:
        validate.plain_name(found)
    return parts


AbsolutePath = Annotated[str, validate.absolute_path]
PlainName = Annotated[str, validate.plain_name]
Address = Annotated[str, validate.address]
Interface = Annotated[str, _interface]
NicName = Annotated[str, _matching(r"[^\s/\x00-\x1f\x7f-\x9f]{1,15}", "the name of a network interface")]
Version = Annotated[str, _matching(r"\d+\.\d+[0-9A-Za-z.+]{0,20}", "a version")]
PlainWord = Annotated[str, _matching(r"[A-Za-z0-9_.@+-]{1,64}", "a word")]
Rights = Annotated[str, _matching("root|passwordless|none", "root, passwordless or none")]
Port = Annotated[int, _within(validate.LOWEST_PORT, validate.HIGHEST_PORT)]
LocalPort = Annotated[int, _within(1, validate.HIGHEST_PORT)]  # the plan opens none below 1024
Processor = Annotated[int, _within(0, 8191)]
Rank = Annotated[int, _within(0, 65535)]
Timeout = Annotated[int, _within(1, 1_000_000)]
Duration = Annotated[float, _within(0, 2**33)]
Positive = Annotated[float, _within(1e-9, 1e15)]
Rate = Annotated[float, _within(0, 1e15)]
Lineage = Annotated[dict[str, Document], _lineage]  # what checkpoints depend on (lineage.py)


def decode(kind: type[Decoded], value: Any, partial: bool = False) -> Decoded:
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
    if origin is NotRequired:
        return _decode(parts[0], value, place, partial)
    if origin in UNIONS:
        return None if value is None else _decode(parts[0], value, place, partial)
    if origin is list and isinstance(value, list):
        return [_decode(parts[0], one, place + ".*", partial) for one in value]
    if origin is dict and isinstance(value, dict):
        return {_text(name): _decode(parts[1], one, place + ".*", partial) for name, one in value.items()}
    if hasattr(kind, "__required_keys__") and isinstance(value, dict):
        return _keys(kind, value, place, partial)
    is_number = _is_number(value) and (kind is float or (kind is int and isinstance(value, int)))
    if kind is object or is_number or (kind in (bool, str) and isinstance(value, kind)):
        return _plain(value, place, 0)
    raise InvalidHostData("its %s: %s" % (place or "answer", refused(value, "something else")))


def _keys(kind: Any, value: dict[str, Any], place: str, partial: bool) -> dict[str, Any]:
    """The values of a section; an unknown key may hold anything plain."""
    hints = _hints(kind)
    unknown = {_text(name): _plain(one, place + ".*", 0) for name, one in value.items() if name not in hints}
    known = {
        name: _decode(own, value[name], (place + "." + name).lstrip("."), partial)
        for name, own in hints.items()
        if name in value
    }
    required = [] if partial else [name for name in hints if get_origin(hints[name]) is not NotRequired]
    missing = sorted(kind.__required_keys__.intersection(required) - value.keys())
    for name in missing:
        if get_origin(hints[name]) not in UNIONS:
            raise InvalidHostData("its %s is missing; %s" % ((place + "." + name).lstrip("."), STILL))
    return {**dict.fromkeys(missing), **unknown, **known}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, localns=globals(), include_extras=True)


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
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and abs(value) < (2**63 if isinstance(value, int) else 1e50)


def _text(value: Any) -> str:
    """A text without lone surrogates, which no file can hold."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


class Master(TypedDict):
    """Where the ranks of a plan meet."""

    host: str
    address: Optional[Address]
    port: Port


class Ports(TypedDict):
    """The range in which Gloo listens."""

    low: Port
    high: Port


class DeployedNode(TypedDict):
    """A node, as far as the doctor needs it."""

    host: str
    rank: Rank
    address: Optional[Address]
    nic: Optional[str]


class DeployedPlan(TypedDict):
    """A plan that a host sent back, as far as the doctor needs it; it may be of another version."""

    run: PlainName
    nodes: list[DeployedNode]
    master: Master
    data_ports: Ports
    timeout_seconds: Optional[Timeout]


def believed_plans(found: Sequence[Any], hosts: Collection[str]) -> list[DeployedPlan]:
    """The valid plans among those that hosts sent back that include one of these hosts; most frequent first.

    A host of a plan may have left the inventory since; it is not contacted.
    """
    plans: list[DeployedPlan] = []
    for one in found:
        with contextlib.suppress(InvalidHostData):
            plan = decode(DeployedPlan, one)
            plans += [plan] if any(node["host"] in hosts for node in plan["nodes"]) else []
    digests = [digest_of(plan) for plan in plans]
    return [plan for dummy, plan in sorted(zip(digests, plans), key=lambda pair: -digests.count(pair[0]))]
