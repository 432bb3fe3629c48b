# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records docs/chat.md: a chat with the demo's fine-tuned model, as a terminal shows it.

    ./demo.sh && ansible-playbook train.yml -i inventory -e ddp_stage=sft && python tools/record_chat.py -i inventory

Needs ansible-playbook on the PATH and a fine-tuned model; types the questions below at its prompt.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is a checkpoint?",
    "What is the capital of Japan?",
    "What is two plus three?",
    "/quit",
)
PROMPT = b"> "
PATIENCE_SECONDS = 600
# What steers a terminal and is not seen.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
PAGE = """# A chat with the demo model

Recorded by `python tools/record_chat.py` after `./demo.sh` and `ansible-playbook train.yml -i inventory -e ddp_stage=sft`, which
fine-tunes the demo's model on trainer/data/conversations.jsonl. The model has memorised those conversations and knows nothing else.

```text
$ ansible-playbook nanochat.ddp.chat -i inventory
{talk}
```
"""


def read_until(terminal: int, end: bytes) -> bytes:
    """All that is written until nothing but the prompt stands there (or, without an end, until it is closed)."""
    seen, limit = b"", time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < limit:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            return seen
        if not piece:
            return seen
        seen += piece
        if end and seen.endswith((b"\n" + end, b"\r" + end)):
            return seen
    raise SystemExit(f"no prompt came within {PATIENCE_SECONDS} s; the last that was seen: {seen[-500:]!r}")


def talk(inventory: str) -> tuple[str, int]:
    """The terminal's output, and the playbook's exit code."""
    argv = ["ansible-playbook", "nanochat.ddp.chat", "-i", inventory, "-e", "temperature=0"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ.update(NO_COLOR="1", TERM="dumb", COLUMNS="150")
        os.execvp(argv[0], argv)
    shown = read_until(terminal, PROMPT)
    for question in QUESTIONS:
        os.write(terminal, question.encode() + b"\n")
        shown += read_until(terminal, b"" if question == "/quit" else PROMPT)
    return CONTROL.sub("", shown.decode(errors="replace")), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a talk with the demo's model.")
    parser.add_argument("-i", "--inventory", default="inventory")
    parser.add_argument("--write", type=Path, default=ROOT / "docs" / "chat.md")
    arguments = parser.parse_args()
    shown, code = talk(arguments.inventory)
    # What came before the model's own first line is the playbook's.
    lines = [line.rstrip() for line in shown.splitlines()]
    begin = next((number for number, line in enumerate(lines) if line.startswith("Step ")), 0)
    cache = os.environ.get("NANOCHAT_DDP_HOME") or "~/.cache/nanochat-ddp"
    lines[begin] = lines[begin].replace(cache, "~/.cache/nanochat-ddp").replace(str(Path.home()), "~")
    arguments.write.write_text(PAGE.format(talk="\n".join(lines[begin:]).strip()), encoding="utf-8")
    print(f"{arguments.write} written.")
    return code


if __name__ == "__main__":
    sys.exit(main())
