# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Validates another keeper's message. It is signed by a host of the run, but that host may be compromised."""

from __future__ import annotations

from typing import Any, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import membership

LONGEST = 4096
DEFAULTS = membership.Word("")


def is_plausible(word: membership.Word, hosts: Sequence[str]) -> bool:
    """Whether each part has its type, and all hosts in it are in the plan."""
    parts = [(value, default) for value, default in zip(word, DEFAULTS) if default is not None]
    return (
        word.host in hosts
        and all(type(value) is type(default) and _fits(value, hosts) for value, default in parts)
        and all(one is None or _is_generation(one, hosts) for one in (word.generation, word.last))
    )


def _fits(value: Any, hosts: Sequence[str]) -> bool:
    if isinstance(value, tuple):
        return all(one in hosts if isinstance(one, str) else _is_count(one) for one in value)
    return len(value) <= LONGEST if isinstance(value, str) else isinstance(value, bool) or _is_count(value)


def _is_generation(found: membership.Generation, hosts: Sequence[str]) -> bool:
    members = found.members
    names = [one for one in members if isinstance(one, str) and one in hosts]
    return _is_count(found.number) and 0 < len(members) == len(set(names))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
