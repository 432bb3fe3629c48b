# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of single values in documents, each with the check that decode.py applies. Files for hosts import them for type checkers only."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Callable, Dict

from . import validate
from .document import Document, section


def _matching(pattern: str, wanted: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not re.fullmatch(pattern, value):
            raise validate.refused(value, wanted)
        return str(value)

    return check


def _within(low: float, high: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not low <= value <= high:
            raise validate.refused(value, "a number from %g to %g" % (low, high))
        return value

    return check


def _interface(value: Any) -> str:
    """An address with its network, such as 192.168.1.10/24."""
    try:
        ipaddress.ip_interface("" if "%" in value else value)
    except ValueError:
        raise validate.refused(value, "an address with its network") from None
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
Word = Annotated[str, _matching(r"[A-Za-z0-9_.@+-]{1,64}", "a word")]
Rights = Annotated[str, _matching("root|passwordless|none", "root, passwordless or none")]
Port = Annotated[int, _within(validate.LOWEST_PORT, validate.HIGHEST_PORT)]
LocalPort = Annotated[int, _within(1, validate.HIGHEST_PORT)]  # the plan opens none below 1024
Processor = Annotated[int, _within(0, 8191)]
Rank = Annotated[int, _within(0, 65535)]
Timeout = Annotated[int, _within(1, 1_000_000)]
Duration = Annotated[float, _within(0, 2**33)]
Positive = Annotated[float, _within(1e-9, 1e15)]
Rate = Annotated[float, _within(0, 1e15)]
Lineage = Annotated[Dict[str, Document], _lineage]  # what checkpoints depend on (lineage.py)
