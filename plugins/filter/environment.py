# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter nanochat.ddp.environment: ddp_secret_env as the plan has read it, whose values are in no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import find
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_types import convert


def environment(value: Any) -> dict[str, str]:
    """A setting of environment variables as names and texts, whether it came from an inventory or as text after -e."""
    try:
        return dict(convert(find("ddp_secret_env"), value))
    except (ValueError, TypeError):
        # What is in it may be secret.
        raise AnsibleFilterError("ddp_secret_env must be a dictionary of environment variables") from None


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"environment": environment}
