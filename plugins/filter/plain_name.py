# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.plain_name: a name that came from a host, before it becomes that of a file or folder here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told


def plain_name(name: Any) -> str:
    """The name, if it can be nothing but one file or folder in its place."""
    try:
        return told.plain_name(name)
    except told.Untrue as why:
        raise AnsibleFilterError(str(why)) from None


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"plain_name": plain_name}
