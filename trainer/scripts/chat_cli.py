# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Talk to a checkpoint. A model fine-tuned on conversations answers; a base model continues the text.

python -m scripts.chat_cli                       # the checkpoint written last
python -m scripts.chat_cli -i base -p "The capital of Italy is"

Ctrl-C interrupts an answer, Ctrl-D or /quit exits, /clear starts a new conversation.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from nanochat.data import conversation, tokenizer
from nanochat.data.tokenizer import Tokenizer
from nanochat.kit.common import UserError, base_dir, check_device, exit_code, tokenizer_dir
from nanochat.kit.settings import Parser, at_least
from nanochat.model.gpt import GPT
from nanochat.rules.messages import Message
from nanochat.rules.stages import BASE, SFT
from nanochat.run import checkpoint_manager, engine

# Characters that a terminal interprets, since a model may emit any: control characters except tab and line feed, and direction marks.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COMMANDS = "Ctrl-C interrupts an answer, Ctrl-D or /quit exits, /clear starts a new conversation."
FOLDERS = {stage.name: stage.folder for stage in (BASE, SFT)}


def choose_folder(source: str, tag: str | None) -> tuple[str, Path]:
    """Source and folder of the requested checkpoints, by default the last changed."""
    found: list[tuple[float, str, Path]] = []
    for name in [source] if source else FOLDERS:
        parent = base_dir() / FOLDERS[name]
        places = [parent / tag] if tag else parent.iterdir() if parent.is_dir() else []
        for place in places:
            models = [path.stat().st_mtime for path in place.glob("model_*.pt")]
            found += [(max(models), name, place)] if models else []
    if not found:
        wanted = f" named {tag}" if tag else ""
        raise UserError(
            f"there is no checkpoint{wanted} in {base_dir()}; train a model with python -m scripts.base_train."
        )
    dummy, name, place = max(found)
    return name, place


class Dialogue:
    """A model and the conversation so far."""

    def __init__(self, model: GPT, tokens: Tokenizer, args: Namespace, answers: bool) -> None:
        self.model, self.tokens, self.args, self.answers = model, tokens, args, answers
        self.messages: list[Message] = []
        self.turn = 0
        length = model.config.sequence_len
        self.most = min(args.max_tokens, max(1, length // 2))
        self.room = length - self.most

    def prompt(self, text: str) -> list[int]:
        """The tokens to continue: the last ones, up to the trained sequence length."""
        if not self.answers:
            return [self.tokens.bos, *self.tokens.encode(text)[-(self.room - 1) :]]
        self.messages.append({"role": "user", "content": text})
        while len(ids := conversation.to_answer(self.tokens, self.messages)) > self.room and len(self.messages) > 2:
            self.messages = self.messages[2:]
        return ids if len(ids) <= self.room else [self.tokens.bos, *ids[1 - self.room :]]

    def show(self, text: str) -> None:
        """Print the answer as it is generated; Ctrl-C stops it."""
        ids, said = self.prompt(text), list[int]()
        stops = engine.stops(self.tokens)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.turn += 1
        seed, top_k = self.args.seed + self.turn - 1, self.args.top_k or None
        if not self.answers:
            print(text, end="", flush=True)
        try:
            for token in engine.generate(self.model, ids, self.most, self.args.temperature, top_k, seed, stops):
                said.append(token)
                piece = decoder.decode(self.tokens.encoding.decode_single_token_bytes(token))
                print(UNSEEN.sub("", piece), end="", flush=True)
            print(UNSEEN.sub("", decoder.decode(b"", final=True)), end="")
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)
        if self.answers:
            self.messages.append({"role": "assistant", "content": self.tokens.decode(said)})

    def run(self) -> None:
        """Read and answer until end of input."""
        asks = sys.stdin.isatty()
        if asks:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
        while True:
            try:
                text = input("> " if asks else "").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nCtrl-D or /quit exits.")
                continue
            if text == "/quit":
                return
            if text == "/clear":
                self.messages, self.turn = [], 0
            elif re.fullmatch(r"/\w+", text):
                print(f"Unknown command {text}. {COMMANDS}")
            elif text:
                self.show(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m scripts.chat_cli", description="Chat with a checkpoint.")
    parser.add_argument("-i", "--source", default="", choices=["", *FOLDERS], help="default: the newest")
    parser.add_argument("-g", "--model-tag", default=None, help="checkpoint folder (default: the one changed last)")
    parser.add_argument("-s", "--step", type=int, default=None, help="step of the checkpoint (default: the newest)")
    parser.add_argument("-p", "--prompt", default="", help="answer this prompt and exit")
    parser.add_argument(
        "-t", "--temperature", type=at_least(0, float), default=0.6, help="0 always picks the most likely token"
    )
    parser.add_argument(
        "-k", "--top-k", type=at_least(0), default=50, help="choose among this many most likely tokens; 0: all"
    )
    parser.add_argument("--seed", type=int, default=42, help="the same seed and input give the same answers")
    parser.add_argument("--max-tokens", type=at_least(1), default=256, help="maximum tokens of an answer")
    parser.add_argument("--device-type", default="", help="cpu, as nanochat's scripts say it")
    args = parser.parse_args(argv)
    check_device(args.device_type)
    tokens = tokenizer.load(tokenizer_dir())
    source, folder = choose_folder(args.source, args.model_tag)
    steps = [n for n in checkpoint_manager.steps_in(folder) if checkpoint_manager.has_model(folder, n, deep=False)]
    if args.step is None and not steps:
        raise UserError(f"there is no model in {folder}; train one with python -m scripts.base_train.")
    step = steps[-1] if args.step is None else args.step
    model = engine.load_model(folder, step, tokens)
    settings = checkpoint_manager.load_meta(folder, step).get("user_config")
    was_fine_tuned = isinstance(settings, dict) and bool(settings.get("conversations"))
    talk = Dialogue(model, tokens, args, source == SFT.name or was_fine_tuned)
    if args.prompt:
        talk.show(args.prompt)
        return
    how = "answers" if talk.answers else "was not fine-tuned on conversations: it continues your text"
    print(f"Step {step} of {folder}; it {how}.")
    print(COMMANDS, flush=True)
    talk.run()


if __name__ == "__main__":
    sys.exit(exit_code(main))
