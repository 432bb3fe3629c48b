# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A measured step with the measured link from the same host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.measured import with_link


def measured_link(
    measured: Mapping[str, Any],
    plan: Mapping[str, Any],
    links: Sequence[Mapping[str, Any]],
    gloo: Mapping[str, Any],
) -> dict[str, Any]:
    """What was measured on a host, with its slowest link."""
    return with_link(measured, plan, links, gloo)


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """What templates may use."""
        return {"measured_link": measured_link}
