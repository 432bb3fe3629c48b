# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fine-tune a base model on conversations, alone or as one of several ranks; then `python -m scripts.chat_cli` talks to it.

    python -m scripts.chat_sft --model-tag d4 --conversations talks.jsonl --num-iterations 100
    torchrun --nproc-per-node 2 -m scripts.chat_sft -- --model-tag d4 --conversations talks.jsonl ...

Each line of the file is a conversation: [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...].
The loss counts only the assistant's tokens. Shape, batch and learning rates default to those of the base checkpoint. All ranks
need the same values, so pass them if a rank has no base checkpoint yet.
"""

from __future__ import annotations

import sys

from nanochat.kit.common import exit_code, leave, pin_to_cores
from nanochat.kit.settings import parse_chat
from nanochat.run.fine_tuning import FineTuning, inherited
from nanochat.run.program import run_stage


def main() -> int:
    pin_to_cores()
    settings = parse_chat(sys.argv[1:], inherited)
    return run_stage(settings, lambda: FineTuning(settings))


if __name__ == "__main__":
    leave(exit_code(main))
