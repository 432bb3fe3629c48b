# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Continue a text with a checkpoint.

python -m scripts.sample -p "The capital of Italy is" --model-tag d4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanochat.data import tokenizer
from nanochat.kit.common import UserError, check_device, checkpoint_dir, exit_code, tokenizer_dir
from nanochat.kit.settings import check_least
from nanochat.run import engine


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.sample", description="Continue a text with a checkpoint.")
    parser.add_argument("-p", "--prompt", default="", help="text to continue (empty: a new document)")
    parser.add_argument("-g", "--model-tag", default=None, help="checkpoint folder (default: the one changed last)")
    parser.add_argument("-s", "--step", type=int, default=None, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum tokens to generate")
    parser.add_argument("-t", "--temperature", type=float, default=0.8, help="0 always picks the most likely token")
    parser.add_argument("-k", "--top-k", type=int, default=50, help="choose among this many most likely tokens; 0: all")
    parser.add_argument("--seed", type=int, default=42, help="the same seed gives the same text")
    parser.add_argument("--device-type", default="", help="cpu, as nanochat's scripts say it")
    args = parser.parse_args(argv)
    check_device(args.device_type)
    check_least(args, max_tokens=0, temperature=0, top_k=0)
    return args


def newest_folder() -> Path:
    """The checkpoint folder changed last."""
    parent = checkpoint_dir("")
    folders = [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    if not folders:
        raise UserError(f"there are no checkpoints in {parent}; train a model with python -m scripts.base_train.")
    return max(folders, key=lambda path: path.stat().st_mtime)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    tokens = tokenizer.load(tokenizer_dir())
    folder = checkpoint_dir(args.model_tag) if args.model_tag else newest_folder()
    step = engine.newest_model(folder) if args.step is None else args.step
    model = engine.load_model(folder, step, tokens)
    top_k = args.top_k or None
    print(engine.complete(model, tokens, args.prompt, args.max_tokens, args.temperature, top_k, args.seed))


if __name__ == "__main__":
    sys.exit(exit_code(main))
