# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The meaning of a finding's code: the type of the registry's entries."""

from __future__ import annotations

from typing import NamedTuple, Tuple

ERROR = "error"
WARNING = "warning"
INFO = "info"

# Versions of Python for the trainer, by how sure it is that every package has a wheel for them.
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 10), (3, 14))
# What makes a Python where none fits, and which.
UV, MADE_PYTHON = "uv==0.13.9", "3.12"
# The same by hand, below the user's home, where the probe looks for it; uv's wheel runs on any Linux with an older Python.
MAKE_PYTHON = f"python3 -m venv ~/uv && ~/uv/bin/pip install {UV} && ~/uv/bin/uv python install {MADE_PYTHON}"
# The trainer's Python with its packages on a disk.
VENV_BYTES = 1_600_000_000


class Kind(NamedTuple):
    """The meaning of one code."""

    severity: str
    title: str
    why: str
    remedy: str
    field: Tuple[int, ...] = ()  # entries of the list of field failures that this code answers
    seen_as: Tuple[str, ...] = ()  # texts by which people search for it
