# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A data set's manifest.json: its files with their digests, in training order, the last shard for validation."""

from __future__ import annotations

from typing import Dict, List, TypedDict

from .document import section, text, whole


class _Pieces(TypedDict, total=False):
    pieces: str  # the digests of its pieces, shortened, one after the other


class ManifestFile(_Pieces):
    """One file of a data set."""

    name: str
    bytes: int
    sha256: str


class Manifest(TypedDict, total=False):
    """Shards and tokenizer of a data set, or the files of any other folder."""

    format: int
    id: str
    shards: List[ManifestFile]
    tokenizer: List[ManifestFile]
    files: List[ManifestFile]


class Remembered(TypedDict, total=False):
    """The digest of a file with its stat, to recognise it unchanged (.digests.json)."""

    bytes: int
    mtime_ns: int
    inode: int
    sha256: str


def remembered(document: object) -> Dict[str, Remembered]:
    """Read .digests.json; invalid entries are dropped, so those files are read again."""
    files = section(document, "files")
    found = {name: _remembered(one) for name, one in files.items()}
    return {name: known for name, known in found.items() if known}


def _remembered(one: object) -> Remembered:
    size, changed, inode = (whole(one, name) for name in ("bytes", "mtime_ns", "inode"))
    sha256 = text(one, "sha256")
    if size is None or changed is None or inode is None or sha256 is None:
        return {}
    return {"bytes": size, "mtime_ns": changed, "inode": inode, "sha256": sha256}
