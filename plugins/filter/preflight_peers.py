# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whom a host is to connect to while the connections between the hosts are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Plan
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight.evidence import peers_of


def preflight_peers(plan: Any, answers: Any, host: str) -> list[dict[str, object]]:
    """The responders of the other hosts, from the next rank on."""
    if not isinstance(plan, Mapping) or not isinstance(answers, Mapping):
        raise AnsibleFilterError(
            "preflight_peers wants a plan and a dictionary from host to what peer_responder returned there"
        )
    return peers_of(
        cast(Plan, plan), {name: answer for name, answer in answers.items() if isinstance(answer, Mapping)}, host
    )


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name and function."""
        return {"preflight_peers": preflight_peers}
