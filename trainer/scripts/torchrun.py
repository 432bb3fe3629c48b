# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torchrun, with its end told in one sentence instead of a traceback, and without a wait of minutes for agents that are gone.

    python -m scripts.torchrun --nnodes=2 --node-rank=0 --master-addr=192.168.1.10 -m scripts.base_train -- --depth=4

All flags are torchrun's own. What went wrong in a rank, the rank itself has said above.
"""

from __future__ import annotations

import functools
import signal
import sys

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

# All ranks end together, so an agent that has not come by then was ended by somebody; torchrun itself waits 300 s.
EXIT_BARRIER_SECONDS = 30
EXIT_ERROR = 1


class Agent(LocalElasticAgent):
    """An agent that, once its own ranks have ended well, is not kept from telling those of the other hosts."""

    def _exit_barrier(self) -> None:
        # Whoever stops all hosts one after the other finds here an agent without ranks; ended by that, it would be waited for.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super()._exit_barrier()  # type: ignore[no-untyped-call]


def main() -> int:
    api.LocalElasticAgent = functools.partial(  # type: ignore[attr-defined,assignment]
        Agent, exit_barrier_timeout=EXIT_BARRIER_SECONDS
    )
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        return tell(" and ".join(ended(rank, failure) for rank, failure in sorted(error.failures.items())))
    except SignalException as error:
        return tell(f"was ended by {error.sigval.name}, and has ended its ranks")
    except (DistError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return tell(f"could not start or hold the ranks: {lines[0].rstrip('.')}")
    except KeyboardInterrupt:
        return tell("was ended by SIGINT, and has ended its ranks")
    return 0


def ended(rank: int, failure: object) -> str:
    """How one rank ended, in words that people search for."""
    code, pid = getattr(failure, "exitcode", None), getattr(failure, "pid", None)
    if isinstance(code, int) and code < 0:
        return f"rank {rank} (pid {pid}) was killed by signal {-code} ({signal.Signals(-code).name}, exitcode: {code})"
    return f"rank {rank} (pid {pid}) ended with exit code {code}"


def tell(what: str) -> int:
    print(f"torchrun: {what}.", file=sys.stderr, flush=True)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
