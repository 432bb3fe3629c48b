# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detects URLs with a password or token, which are rejected because plans, reports and logs show URLs."""

from __future__ import annotations

import re

# SCHEME://USER:PASSWORD@HOST; for https also just a user, which is often a token, but not the user of ssh://git@HOST.
_USER = re.compile(r"(?i)\b((?:https?|ftps?)://|[a-z][a-z0-9+.-]*://(?=[^\s/@]*:))([^\s/@]+@)+")
MASK = "********@"
NO_CREDENTIALS = (
    "a URL with a password or token in it, which plans and reports would show; remove it, and put it into ~/.netrc of the "
    "host that asks, or a whole variable into ddp_secret_env"
)


def has_credentials(text: str) -> bool:
    """Whether a text contains a URL with credentials."""
    return _USER.search(text) is not None


def masked(text: str) -> str:
    """The text with credentials in its URLs masked."""
    return _USER.sub(lambda found: found.group(1) + MASK, text)
