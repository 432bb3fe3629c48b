# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a plan's run by the probes of its hosts, decided once for all of them."""

from __future__ import annotations

from typing import Any, Mapping, TypedDict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document, items, section, text


class SoFar(TypedDict):
    """Whether a session of the run lives on any host, and whether this very plan has been carried out on all of them."""

    running: bool
    done: bool


def so_far(digest: str, probes: Mapping[str, Any], fresh: bool) -> SoFar:
    """From the probe of every host of the plan; a run that is to start from scratch is not done, whatever it did before."""
    return {
        "running": any(_lives(probe) for probe in probes.values()),
        "done": not fresh and all(_carried_out(probe, digest) for probe in probes.values()),
    }


def _lives(probe: Document) -> bool:
    session = text(section(section(probe, "run"), "session"), "id")
    return bool(session) and any(process.get("session") == session for process in items(probe, "processes"))


def _carried_out(probe: Document, digest: str) -> bool:
    run = section(probe, "run")
    session = section(run, "session")
    # A run that was stopped ends well too, but with steps left to make.
    return run.get("plan_digest") == digest and session.get("exit_code") == 0 and not session.get("stopped")
