# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A data set's manifest.json: its files with their digests, in training order, the last shard for validation."""

from __future__ import annotations

from typing import List, TypedDict


class ManifestFile(TypedDict):
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
    """The digest of a file as it was, by which it is known unchanged (.digests.json)."""

    bytes: int
    mtime_ns: int
    inode: int
    sha256: str


class Offered(TypedDict):
    """A file that may be fetched here, and how often it was."""

    bytes: int
    sha256: str
    times: int
