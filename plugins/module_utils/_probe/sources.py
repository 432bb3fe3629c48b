# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks paths from the settings, on a host or on the controller. Read-only."""

from __future__ import annotations

import glob
import os
import stat
from typing import Optional

from .._contract.probe import Folder
from .._contract.run_folder import TOKENIZER

# In a Python library, what scripts.make_shards leaves out.
NO_TEXT = ("site-packages", "dist-packages", "__pycache__")
# A tree without files is small; a large one is not read to its end.
MOST_FOLDERS = 2000


def folder_facts(path: str) -> Folder:
    """Describe a path: its kind, whether it is readable, and whether it contains parts of a data set."""
    full = os.path.abspath(os.path.expanduser(path))
    kind = "folder" if os.path.isdir(full) else "file" if os.path.exists(full) else "absent"
    readable = os.access(full, os.R_OK | (os.X_OK if kind == "folder" else 0))
    return {
        "path": full,
        "kind": kind,
        "readable": readable,
        "shards": len(glob.glob(os.path.join(glob.escape(full), "*.parquet"))),
        "tokenizer": all(os.path.isfile(os.path.join(full, name)) for name in TOKENIZER),
        "text_bytes": text_bytes(full),
    }


def text_bytes(path: str) -> Optional[int]:
    """The size of the visible files in a folder, or of a file; None for one with very many folders."""
    try:
        total = os.path.getsize(path) if os.path.isfile(path) else 0
        for number, (root, folders, names) in enumerate(os.walk(path)):
            if number > MOST_FOLDERS:
                return None
            folders[:] = [name for name in folders if not name.startswith(".") and name not in NO_TEXT]
            files = [os.lstat(os.path.join(root, name)) for name in names if not name.startswith(".")]
            total += sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
    except OSError:
        return None
    return total
