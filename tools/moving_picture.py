# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records the screen while commands run in a terminal, and writes it as one animated SVG file.

    python tools/moving_picture.py docs/images/storm.svg './demo.sh --storm'

Each command is typed at a prompt in tmux and runs to its end. Only the screen is recorded, several times a second, so the
picture shows a real run; pauses are shortened, and the picture says by how much. Browsers and GitHub play the file
without a script.
"""

from __future__ import annotations

import argparse
import html
import itertools
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = os.environ.get("NANOCHAT_DDP_HOME") or "~/.cache/nanochat-ddp"
COLUMNS, ROWS = 118, 30
LOOKS_PER_SECOND = 5
LONGEST_PAUSE = 1.0  # seconds that an unchanged screen is shown for
LAST_SECONDS = 6.0
CHARACTER, LINE, MARGIN = 7.83, 18, 16  # of a monospaced font of 13 px
STYLE = re.compile(r"\x1b\[([0-9;]*)m")
OTHER_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-ln-z]|\([A-Z0-9]|[=>])|\x0f")
PALETTE = {30: "#6e7681", 31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea"}


class Frame(NamedTuple):
    """The screen, and when it was first seen."""

    time: float
    lines: tuple[str, ...]


class Screen:
    """A terminal of its own, in a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.prompted = folder / "tmux", folder / "prompted"
        settings = folder / "bashrc"
        settings.write_text(f"PS1='$ '\nPROMPT_COMMAND='echo >>{shlex.quote(str(self.prompted))}'\n", encoding="utf-8")
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, f"exec bash --rcfile {settings}")

    def tmux(self, *words: str) -> str:
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        argv = ["tmux", "-u", "-S", str(self.socket), *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True, env=environment).stdout

    def prompts(self) -> int:
        return len(self.prompted.read_text()) if self.prompted.exists() else 0

    def frame(self) -> Frame:
        text = OTHER_CONTROL.sub("", self.tmux("capture-pane", "-e", "-p", "-t", ":0"))
        # Hide the path of this machine's checkout and files.
        text = text.replace(str(ROOT), "~/nanochat.ddp").replace(CACHE, "~/.cache/nanochat-ddp")
        # Hide this machine's Python.
        text = text.replace(sysconfig.get_path("stdlib"), "/usr/lib/python3").replace(str(Path.home()), "~")
        return Frame(time.monotonic(), tuple(line.rstrip() for line in text.splitlines()))


def wait_for_prompt(screen: Screen, number: int, frames: list[Frame], limit: float) -> None:
    """Record until this many prompts were printed."""
    until = time.monotonic() + limit
    while screen.prompts() < number:
        record(screen, frames)
        if time.monotonic() > until:
            raise SystemExit(
                f"The command did not end within {limit:.0f} s; its screen:\n" + "\n".join(frames[-1].lines)
            )
    record(screen, frames)


def record(screen: Screen, frames: list[Frame]) -> None:
    frame = screen.frame()
    if not frames or frame.lines != frames[-1].lines:
        frames.append(frame)
    time.sleep(1 / LOOKS_PER_SECOND)


def perform(commands: list[str], limit: float) -> list[Frame]:
    """Type the commands one after another and record all that is seen."""
    frames: list[Frame] = []
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen(Path(folder))
        try:
            wait_for_prompt(screen, 1, frames, 30)
            for number, command in enumerate(commands, 2):
                screen.tmux("send-keys", "-l", command)
                record(screen, frames)
                screen.tmux("send-keys", "Enter")
                wait_for_prompt(screen, number, frames, limit)
        finally:
            screen.tmux("kill-server")
    return frames


def shortened(frames: list[Frame], speed: float) -> list[tuple[float, tuple[str, ...]]]:
    """Each screen with the seconds that it is shown for."""
    spans = [after.time - before.time for before, after in itertools.pairwise(frames)]
    return [
        (min(seconds / speed, LONGEST_PAUSE), frame.lines)
        for seconds, frame in zip([*spans, LAST_SECONDS * speed], frames, strict=True)
    ][:-1] + [(LAST_SECONDS, frames[-1].lines)]


def pieces(line: str) -> Iterator[tuple[str, str]]:
    """Text and its style, from the escape sequences of a line."""
    color, bold, dim, at = "", False, False, 0
    for found in [*STYLE.finditer(line), None]:
        text = line[at : found.start() if found else None]
        if text:
            yield (
                text,
                (f' fill="{color}"' if color else "")
                + (' font-weight="bold"' if bold else "")
                + (' opacity=".7"' if dim else ""),
            )
        if found is None:
            return
        at = found.end()
        for code in [int(word or 0) for word in found[1].split(";")]:
            if code == 0:
                color, bold, dim = "", False, False
            elif code in (1, 2):
                bold, dim = bold or code == 1, dim or code == 2
            elif code == 39:
                color = ""
            else:
                color = PALETTE.get(code if code < 90 else code - 60, color)


def line_of_text(number: int, line: str) -> str:
    parts, column = [], 0
    for text, style in pieces(line):
        if text.strip():
            begin = column + len(text) - len(text.lstrip())
            parts.append(f'<tspan x="{begin * CHARACTER:.1f}"{style}>{html.escape(text.strip())}</tspan>')
        column += len(text)
    return f'<text id="l{number}" xml:space="preserve">{"".join(parts)}</text>'


def drawing(shown: list[tuple[float, tuple[str, ...]]], title: str) -> str:
    """A strip of all screens behind a window, moved from one to the next."""
    numbers = {
        line: n for n, line in enumerate(dict.fromkeys(line for _seconds, lines in shown for line in lines if line))
    }
    total, at, keys, screens = sum(seconds for seconds, _lines in shown), 0.0, [], []
    height, width = ROWS * LINE + 2 * MARGIN + 24, COLUMNS * CHARACTER + 2 * MARGIN
    for position, (seconds, lines) in enumerate(shown):
        keys.append(f"{100 * at / total:.3f}%{{transform:translateY({-position * height}px)}}")
        uses = "".join(
            f'<use href="#l{numbers[line]}" y="{row * LINE}"/>' for row, line in enumerate(lines[:ROWS]) if line
        )
        screens.append(f'<g transform="translate(0 {position * height})">{uses}</g>')
        at += seconds
    definitions = "".join(line_of_text(number, line) for line, number in numbers.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>"
        "<style>text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3;white-space:pre}"
        f"#strip{{animation:play {total:.1f}s step-end infinite}}@keyframes play{{{''.join(keys)}}}</style>"
        f'<defs>{definitions}<clipPath id="window"><rect width="{width:.0f}" height="{height - 30}"/></clipPath></defs>'
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117" stroke="#30363d"/>'
        '<g fill="#484f58"><circle cx="18" cy="15" r="5"/><circle cx="36" cy="15" r="5"/><circle cx="54" cy="15" r="5"/></g>'
        f'<g transform="translate(0 30)" clip-path="url(#window)"><g id="strip"><g transform="translate({MARGIN} {LINE})">'
        f"{''.join(screens)}</g></g></g></svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("commands", nargs="+", help="typed one after another")
    parser.add_argument(
        "--speed", type=float, default=2.0, help="how many times faster than real time (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=900, help="seconds that one command may take")
    given = parser.parse_args()
    frames = perform(given.commands, given.limit)
    seconds = frames[-1].time - frames[0].time
    shown = shortened(frames, given.speed)
    title = f"{' && '.join(given.commands)}: {seconds:.0f} seconds, shown in {sum(one for one, _lines in shown):.0f}"
    given.picture.write_text(drawing(shown, title), encoding="utf-8")
    print(
        f"{given.picture}: {len(shown)} screens, {given.picture.stat().st_size / 1e3:.0f} kB. {title}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
