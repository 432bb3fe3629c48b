# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validates data from a host before it is used as a path, name, address or port (docs/trust.md), and finds passwords in URLs.

Each check of data returns the value, or raises InvalidHostData with a sentence. A compromised host may send anything.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

HIGHEST_PORT = 65535
LOWEST_PORT = 1024  # lower ports belong to root's services
LONGEST_PATH = 4096
BIGGEST_FILE = 2**50
STILL = "check that host: it may be compromised or broken"


class InvalidHostData(ValueError):
    """A host sent an invalid or forbidden value; the text is for the user."""


def refused(value: Any, wanted: str) -> InvalidHostData:
    """The error for a value, with what was expected."""
    # ascii: it may contain terminal control characters.
    return InvalidHostData("a host sent %.80s instead of %s; %s" % (ascii(value), wanted, STILL))


def plain_name(value: Any) -> str:
    """A plain name of one file or folder."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", value):
        raise refused(value, "a plain name (letters, digits, '.', '_', '-')")
    return value


def file_path(value: Any) -> str:
    """The path of a file below some folder: printable, no parent, nothing hidden."""
    parts = value.split("/") if _is_visible(value) else [""]
    if any(not part or part.startswith(".") or len(part) > 255 for part in parts):
        raise refused(value, "a plain path inside a folder")
    return str(value)


def absolute_path(value: Any) -> str:
    """An absolute path on that host; a line feed in it would start another sftp command."""
    path = value if _is_visible(value) and len(value) <= LONGEST_PATH else ""
    if not path.startswith("/") or ".." in path.split("/"):
        raise refused(value, "an absolute path")
    return path


def _is_visible(value: Any) -> bool:
    """Whether it is text without control characters."""
    return isinstance(value, str) and not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", value)


def sha256(value: Any) -> str:
    """A digest in the format of our manifests."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise refused(value, "a SHA-256")
    return value


def whole(value: Any, low: int = 0, high: int = BIGGEST_FILE) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refused(value, "a number from %d to %d" % (low, high))
    return value


def port(value: Any) -> int:
    """An unprivileged port."""
    return whole(value, LOWEST_PORT, HIGHEST_PORT)


def address(value: Any) -> str:
    """An address of one machine. Zones are rejected, because any text may follow their %."""
    try:
        found = ipaddress.ip_address(value if isinstance(value, str) and "%" not in value else "")
    except ValueError:
        raise refused(value, "an IP address") from None
    if found.is_multicast or found.is_unspecified or str(found) == "255.255.255.255":
        raise refused(value, "the address of a machine")
    return str(found)


# URLs with a password or token are refused, because plans, reports and logs show URLs

# SCHEME://USER:PASSWORD@HOST; for https also just a user, which is often a token, but not the user of ssh://git@HOST.
_USER = re.compile(r"(?i)\b((?:https?|ftps?)://|[a-z][a-z0-9+.-]*://(?=[^\s/@]*:))([^\s/@]+@)+")
NO_CREDENTIALS = (
    "a URL with a password or token in it, which plans and reports would show; remove it, and put it into ~/.netrc of the "
    "host that asks, or a whole variable into ddp_secret_env"
)


def has_credentials(text: str) -> bool:
    """Whether a text contains a URL with credentials."""
    return _USER.search(text) is not None


def masked(text: str) -> str:
    """The text with credentials in its URLs masked."""
    return _USER.sub(lambda found: found.group(1) + "********@", text)
