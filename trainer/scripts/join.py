# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Let an unmodified nanochat checkout train together on CPUs. From the checkout's folder, on every host:

    torchrun --nnodes 2 --node-rank 0 --master-addr 192.168.1.10 /path/to/trainer/scripts/join.py scripts.base_train --depth=4

The script and its flags are the checkout's own. We add what it lacks: a Gloo group, the exchanges its optimizer uses, float32
on hosts with a GPU, metrics, heartbeats, a check that all ranks hold the same weights, whole checkpoints on every host, and a
checkpoint on SIGTERM. Our flags go before the script's name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    os.environ.setdefault("NANOCHAT_DTYPE", "float32")
    # The checkout's package has the same name, and takes its place before the script runs.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from nanochat.join.launch import launch
    from nanochat.kit.common import exit_code

    return exit_code(lambda: launch((__doc__ or "").split("\n\n", maxsplit=1)[0]))


if __name__ == "__main__":
    sys.exit(main())
