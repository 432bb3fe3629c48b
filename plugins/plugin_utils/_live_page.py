# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The live page of a watched run: copies the hosts' new metrics, and makes the report with their current state.

Each host's process copies that host's files to where `collect` keeps them. One of the processes writes the page atomically.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action import run_files
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import plain_run_name
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import write_whole
from ansible_collections.nanochat.ddp.plugins.module_utils._run.collected import ReportError, host_folder
from ansible_collections.nanochat.ddp.plugins.module_utils._run.files import CopyError
from ansible_collections.nanochat.ddp.plugins.module_utils._run.live_line import now_of
from ansible_collections.nanochat.ddp.plugins.module_utils._run.metrics import finite
from ansible_collections.nanochat.ddp.plugins.module_utils._run.report import make_report
from ansible_collections.nanochat.ddp.plugins.plugin_utils._company import Ledger

PAGE = str(Path(__file__).resolve().parents[2] / "roles" / "collect" / "files")
LOOK_SECONDS = 4.0  # polling interval with a page
RENEW_SECONDS = 3.0
SHARE = 0.1  # maximum fraction of the controller's time for the page of a long run


def bring(action: ActionBase, run_dir: str, folder: Path, host: str, variables: Mapping[str, Any]) -> None:
    """Copy a host's new metrics and log through the action's connection."""
    place = folder / host_folder(host)
    # Invalid data from a host is rejected there and reported by collect; the page continues without it.
    with contextlib.suppress(CopyError):
        run_files.bring(action, {"run_dir": run_dir, "dest": str(folder.parent)}, place, dict(variables))


def run_folder(results: str, run_dir: str) -> Path:
    """Folder of a run's results."""
    return Path(results).expanduser().absolute() / plain_run_name(Path(run_dir).name)


def renew(rows: Sequence[Mapping[str, Any]], folder: Path, ledger: Ledger, last: bool = False) -> bool:
    """Write the page unless another process is doing so or just has; the last one waits for its turn."""
    claim = ledger.claim("page", wait=last)
    if claim is None:
        return False
    with claim:
        before, now = ledger.read("page"), time.time()
        pause = max(RENEW_SECONDS, (finite(before.get("took")) or 0.0) / SHARE)
        if not last and now - (finite(before.get("at")) or 0.0) < pause:
            return False
        # Before anything was copied there is nothing to show.
        with contextlib.suppress(ReportError, OSError):
            write_whole(str(folder / "live.html"), make_report([str(folder)], PAGE, now_of(rows, now)))
        ledger.write("page", {"at": time.time(), "took": time.time() - now})
    return True
