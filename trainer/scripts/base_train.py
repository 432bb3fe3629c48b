# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pretrain a base model, alone or as one of several ranks.

    python -m scripts.base_train --depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 2048
    torchrun --nproc-per-node 2 -m scripts.base_train -- --depth 4 ...

--help lists every flag. NANOCHAT_BASE_DIR and NANOCHAT_DATA_DIR set the folders.
"""

from __future__ import annotations

import sys

from nanochat.kit.common import exit_code, leave, pin_to_cores
from nanochat.kit.settings import parse
from nanochat.run.program import run_stage
from nanochat.run.stage import RunStage


def main() -> int:
    pin_to_cores()
    return run_stage(parse(sys.argv[1:]), RunStage)


if __name__ == "__main__":
    leave(exit_code(main))
