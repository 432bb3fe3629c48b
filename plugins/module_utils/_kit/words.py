# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Formats figures and tables: seconds, bytes, shares, columns. Unknown values become a dash."""

from __future__ import annotations

import re
import textwrap
import time
from typing import Any, List, Optional, Sequence

DASH = "-"


def plural(count: int, noun: str) -> str:
    """Such as `1 file` or `3 files`."""
    return "%d %s" % (count, noun if count == 1 else noun + "s")


def seconds_text(seconds: Optional[float]) -> str:
    """A duration in its two largest units."""
    if seconds is None:
        return DASH
    if seconds < 10:
        return "%.1f s" % seconds
    if seconds < 60:
        return "%.0f s" % seconds
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return "%d min %02d s" % (minutes, left)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return "%d h %02d min" % (hours, minutes)
    return "%d d %d h" % divmod(hours, 24)


def clock_time(at: float) -> float:
    """A point in time that any system can print, until the year 2242."""
    return min(max(at, 0.0), 2.0**33)


def clock_text(at: float) -> str:
    """A point in time in local time, with the date if it is another day."""
    then, now = time.localtime(clock_time(at)), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%a %H:%M", then)


def bytes_text(count: Optional[float]) -> str:
    """A number of bytes in decimal units."""
    if count is None:
        return DASH
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return "%.*f %s" % (1 if count < 100 * size else 0, count / size, unit)
    return "%d B" % count


def speed_text(tokens_per_second: Optional[float]) -> str:
    """Tokens per second, rounded sensibly."""
    if tokens_per_second is None:
        return DASH
    return "%.*f" % (0 if tokens_per_second >= 100 else 1, tokens_per_second)


def share_text(share: Optional[float]) -> str:
    """A share as a percentage."""
    return DASH if share is None else "%.*f %%" % (1 if share < 0.0995 else 0, 100 * share)


def loss_text(loss: Optional[float]) -> str:
    """A loss or similar figure."""
    return DASH if loss is None else "%.4f" % loss


def columns(rows: Sequence[Sequence[Any]]) -> List[str]:
    """Indented lines with aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 0) -> List[str]:
    """A table with a header; columns without any value are dropped.

    If it is wider than the width, it is in blocks one below the other, each with the first column.
    """

    def block(columns_shown: Sequence[int]) -> List[str]:
        return columns([[line[at] for at in columns_shown] for line in [header, *rows]])

    kept = [at for at in range(len(header)) if any(row[at] not in ("", DASH) for row in rows)]
    blocks = [kept[:1]]
    for at in kept[1:]:
        if width and len(blocks[-1]) > 1 and max(map(len, block([*blocks[-1], at]))) > width:
            blocks.append(kept[:1])
        blocks[-1].append(at)
    return [line for one in blocks for line in block(one)]


def named(hosts: Sequence[str]) -> str:
    """Host names in a sentence."""
    return ", ".join(hosts)


def wrapped(line: str, width: int) -> List[str]:
    """A sentence in lines of at most this width, without cutting a word; 0 means no limit."""
    if not width or len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def plain_reason(message: str) -> str:
    """Why a host could not be reached, without Ansible's prefix; empty if unknown."""
    if not message:
        return ""
    said = re.sub(r"^Task failed: ", "", message.strip())
    if said.startswith("Module result deserialization failed"):
        return (
            "the Python that Ansible found there does not run (for example a pyenv shim for a version that is not installed): set another "
            "one as ansible_python_interpreter of that host, for example /usr/bin/python3"
        )
    said = re.sub(
        r"^(Failed to connect to the host via ssh|Data could not be sent to remote host .*? over ssh):\s*", "", said
    )
    # With a persistent connection, ssh first reports that it broke, then why there is no new one, or nothing.
    return re.sub(r"^mux_client_\w+: .*\n+(?=.)", "", said) or "the connection broke"
