# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a plan's run from its hosts' probes, decided once for all."""

from __future__ import annotations

from typing import Any, Mapping, TypedDict

from .._contract.document import Document, items, section, text


class SoFar(TypedDict):
    """Whether a session of the run is alive on any host, and whether this plan has been completed on all."""

    running: bool
    done: bool


def so_far(digest: str, probes: Mapping[str, Any], fresh: bool) -> SoFar:
    """From all hosts' probes; a run to be started from scratch is not done."""
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
    # A stopped run also exits with 0, but has steps left.
    return run.get("plan_digest") == digest and session.get("exit_code") == 0 and not session.get("stopped")
