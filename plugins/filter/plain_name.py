# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.plain_name: a name that came from a host, before it becomes that of a file or folder here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError


def plain_name(name: Any) -> str:
    """The name, if it can be nothing but one file or folder in its place."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise AnsibleFilterError(
            f"a host says {str(name)[:80]!r} where a plain name is wanted (letters, digits, '.', '_', '-'); look whether that host is "
            "still what it was"
        )
    return name


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """What templates may use."""
        return {"plain_name": plain_name}
