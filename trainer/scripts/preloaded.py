# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps PyTorch and the trainer loaded and forks ranks on request, one at a time.

    python -m scripts.preloaded scripts.base_train

The arguments are modules to load. Standard input is a socket: each line is an order, {"argv": ["-m", module, ...], "env": {}}. The
reply, once the forked process has ended, is its exit code (negative: killed by this signal). It exits at end of input.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

STDIN = 0
# Ignored: the rank gets them too, and input ends when the keeper does.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> int:
    link = socket.socket(fileno=os.dup(STDIN))
    os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for name in sys.argv[1:]:
        # A failed import is reported by the module that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with link, link.makefile("r", encoding="utf-8") as orders:
        for line in orders:
            # A signal waits until the rank has handlers of its own.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            pid = os.fork()
            if not pid:
                os.close(link.detach())
                become(json.loads(line))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            link.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return 0


def become(order: dict[str, Any]) -> NoReturn:
    """In the forked process: act as `python -u -m module words`."""
    code: object = 0
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for stream in (sys.stdout, sys.stderr):
        # None where it was closed.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    try:
        os.environ.update(order["env"])
        dummy, module, *words = order["argv"]
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    sys.exit(main())
