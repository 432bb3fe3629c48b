# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The life of one rank's process, in any stage: connect, train, and report the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from nanochat.kit.common import UserError, first_line, name_process, read_ranks
from nanochat.kit.connections import all_ends, start_pacing
from nanochat.kit.settings import Settings
from nanochat.parallel.comm import Comm, CommError, connect
from nanochat.record.journal import Journal
from nanochat.rules.causes import Cause
from nanochat.run.loop import train
from nanochat.run.saving import save_alone
from nanochat.run.setup import set_up, start_event
from nanochat.run.stage import RunStage
from nanochat.run.state import Run

EXIT_ERROR = 2
CUT_OFF_SECONDS = 0.4  # so long after its connection was closed, a wait has failed or never will
PR_SET_PDEATHSIG = 1  # constant of Linux's prctl
# Called where a rank is lost: saves what it can without that, and returns a sentence about it, if anything is to say.
Rescue = Callable[[], str | None]


def run_stage(settings: Settings, make_stage: Callable[[], RunStage]) -> int:
    """A whole run; returns the process's exit code."""
    name_process()
    ranks = read_ranks()
    journal, comm, run = Journal(settings, ranks), None, None

    def rescue() -> str | None:
        return save_alone(run) if run is not None and settings.save_on_loss else None

    try:
        comm = connect(ranks, "cpu", settings.timeout_seconds, on_phase=journal.heartbeat.enter)
        if comm.world > 1:
            start_pacing()
            end_when_cut_off(journal, comm, rescue)
        run = set_up(settings, comm, journal, make_stage())
        start_event(run)
        stop_when_asked(run)
        reason = train(run)
        run.feed.loader.close()
        comm.close()
    except CommError as error:
        return lost(journal, comm, rescue, error)
    except UserError as error:
        return fail(journal, comm, error)
    except KeyboardInterrupt:
        return fail(journal, comm, UserError("interrupted before the first step.", Cause.STOPPED))
    # Also catches what no library should raise, such as Rust panics.
    except BaseException as error:
        return fail(journal, comm, unexpected(journal, error))
    journal.end(reason)
    return 0


def lost(journal: Journal, comm: Comm | None, rescue: Rescue, error: CommError) -> int:
    """Save what can be saved without the other ranks, and report the end."""
    if said := rescue():
        journal.say(f"A rank was lost: {said}")
    if journal.heartbeat.hung_up:
        # The reason given by whoever closed the connections, instead of this rank's error.
        error = CommError(f"rank {journal.rank} lost the others ({journal.heartbeat.hung_up}).", Cause.PEER_LOST, [])
    return fail(journal, comm, error)


def end_when_cut_off(journal: Journal, comm: Comm, rescue: Rescue) -> None:
    """End this rank if it still waits after a connection was closed: Gloo never tells a wait of that if part of its message has
    arrived."""
    # The rendezvous store's connections may come and go.
    store = int(os.environ["MASTER_PORT"])
    at_first = {ends for ends in all_ends() if all(end[1] != store for end in ends)}

    def watch() -> None:
        while True:
            time.sleep(CUT_OFF_SECONDS)
            if comm.waited() < CUT_OFF_SECONDS or not (journal.heartbeat.hung_up or at_first - all_ends()):
                continue
            # If it waited for its own error, it is over by now.
            time.sleep(CUT_OFF_SECONDS)
            if comm.stop_waiting(2 * CUT_OFF_SECONDS):
                # The store, which could explain more, was hung up on, too.
                error = CommError("", Cause.PEER_LOST, []) if journal.heartbeat.hung_up else comm.explain_wait()
                lost(journal, comm, rescue, error)

    threading.Thread(target=watch, name="cut-off", daemon=True).start()


def stop_when_asked(run: Run) -> None:
    """SIGTERM and Ctrl-C: finish the step, save, exit cleanly. A second Ctrl-C exits at once."""

    def take(number: int, dummy: object) -> None:
        run.stop_asked = True
        signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)

    signal.signal(signal.SIGTERM, take)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # If what started it is killed, a rank would continue as an unstoppable orphan: it saves and exits.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, take)


def unexpected(journal: Journal, error: BaseException) -> UserError:
    """A sentence for an unexpected error; the traceback goes into a file for developers."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        text = "not enough memory on this machine; lower --device-batch-size, --max-seq-len or --depth."
        return UserError(text, Cause.OOM)
    path, last = journal.folder / f"crash-{os.getpid()}.txt", traceback.extract_tb(error.__traceback__)[-1]
    place = f"it was raised in {last.name}, line {last.lineno} of {last.filename}"
    with contextlib.suppress(OSError):
        path.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
        place = f"the traceback is in {path}"
    text = f"{type(error).__name__}: {first_line(error)}; this is a bug in nanochat.ddp; {place}."
    return UserError(text, Cause.BUG)


def fail(journal: Journal, comm: Comm | None, error: UserError) -> int:
    """Report the error, also to the other ranks, and exit without waiting for exchanges that nobody will finish."""
    text = " ".join(str(error).split())
    # A full disk under the log must not keep the other ranks from learning why.
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {text}", file=sys.stderr, flush=True)
    blames = [journal.rank] if error.blames is None else list(error.blames)
    journal.end("error", text, error.cause, blames)
    if comm is not None and comm.world > 1:
        comm.give_up(text, error.cause, blames)
        os._exit(EXIT_ERROR)
    return EXIT_ERROR
