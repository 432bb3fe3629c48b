# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bits per byte of a base model on the validation shard, alone or split among several ranks.

    python -m scripts.base_eval --model-tag d4 --eval-tokens 65536
    python -m scripts.torchrun --nproc-per-node 2 -m scripts.base_eval -- --model-tag d4

Shape and batch default to those of the checkpoint.
"""

from __future__ import annotations

import sys

from nanochat.kit.common import exit_code
from nanochat.kit.cores import pin
from nanochat.kit.settings import EvalSettings, parse_later
from nanochat.run.evaluation import Evaluation, measure
from nanochat.run.fine_tuning import inherited
from nanochat.run.program import run_stage


def main() -> int:
    pin()
    settings = parse_later(EvalSettings, sys.argv[1:], inherited)
    return run_stage(settings, lambda: Evaluation(settings), measure)


if __name__ == "__main__":
    sys.exit(exit_code(main))
