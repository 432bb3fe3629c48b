# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pretrain a base model, alone or as one of several ranks.

    python -m scripts.base_train --depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 2048
    torchrun --nproc_per_node 2 -m scripts.base_train --depth 4 ...

--help lists every flag. The environment says where things are: NANOCHAT_BASE_DIR, NANOCHAT_DATA_DIR.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback

from nanochat.comm import Comm, connect, outlast_agents
from nanochat.common import UserError, choose_device, exit_code, read_ranks
from nanochat.journal import Journal
from nanochat.run import Run, set_up
from nanochat.settings import parse
from nanochat.train import start_event, train

EXIT_ERROR = 2


def main() -> int:
    settings, ranks = parse(sys.argv[1:]), read_ranks()
    journal, comm = Journal(settings, ranks), None
    try:
        device = choose_device(settings.device_type)
        comm = connect(ranks, device, settings.timeout_seconds, on_phase=journal.heartbeat.enter)
        run = set_up(settings, comm, journal)
        start_event(run)
        stop_when_asked(run)
        reason = train(run)
        run.feed.loader.close()
        comm.close()
    except UserError as error:
        return fail(journal, comm, str(error))
    except KeyboardInterrupt:
        return fail(journal, comm, "interrupted before the first step.")
    except Exception as error:
        return fail(journal, comm, unexpected(journal, error))
    journal.end(reason)
    outlast_agents(comm)
    return 0


def stop_when_asked(run: Run) -> None:
    """SIGTERM and Ctrl-C: finish the step, save, end well. A second Ctrl-C ends at once."""

    def ask(number: int, dummy: object) -> None:
        run.stop_asked = True
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)


def unexpected(journal: Journal, error: Exception) -> str:
    """A sentence for what nobody foresaw; the stack goes into a file, for whoever mends it."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "the memory of this machine is not enough; lower --device-batch-size, --max-seq-len or --depth."
    path = journal.folder / f"crash-{os.getpid()}.txt"
    with contextlib.suppress(OSError):
        path.write_text(traceback.format_exc(), encoding="utf-8")
    return f"{type(error).__name__}: {lines[0].rstrip('.')}; this is a mistake of ours, its stack is in {path}."


def fail(journal: Journal, comm: Comm | None, error: str) -> int:
    """Say why, also to the other ranks, and go without waiting for exchanges that no one will finish."""
    print(f"error: {' '.join(error.split())}", file=sys.stderr, flush=True)
    journal.end("error", error)
    if comm is not None and comm.world > 1:
        comm.give_up(error)
        os._exit(EXIT_ERROR)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(exit_code(main))
