# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parquet shards: their files, row groups and texts.

Files are sorted by name; the last one is for validation, the rest for training. Those that scripts.make_shards has made carry
a mark: their text is cut into rows without dropping any of it (dataloader.TextPacker).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet as pq

from nanochat.kit.common import DataError, first_line

TEXT = "text"
# In the files' metadata.
EVERY_TOKEN = {b"nanochat.ddp": b"every token"}


class Shard(NamedTuple):
    """One parquet file, the number of documents in each row group, whether to use every token, and a digest."""

    path: Path
    group_rows: tuple[int, ...]
    every_token: bool = False
    digest: str = ""


def shard_paths(folder: Path) -> list[Path]:
    """All shards of a folder in training order."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(".parquet"))
    except OSError as error:
        raise DataError(f"cannot read the data folder {folder}: {error.strerror or error}.") from None
    if not paths:
        raise DataError(
            f"there are no parquet files in {folder}; create them from text with python -m scripts.make_shards."
        )
    return paths


def split_paths(folder: Path, split: str) -> list[Path]:
    """The shards of "train" (all but the last) or "val" (the last)."""
    paths = shard_paths(folder)
    if len(paths) < 2:
        raise DataError(
            f"{folder} holds only {paths[0].name}, but the last file is for validation; at least two shards are needed."
        )
    return paths[:-1] if split == "train" else paths[-1:]


def open_shard(path: Path) -> pq.ParquetFile:
    """One shard with its footer read; rejects files that are not parquet files of texts."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a complete parquet file ({first_line(error)}); copy or rebuild it.") from None
    schema = file.schema_arrow
    if TEXT not in schema.names:
        raise DataError(f"{path} has no column {TEXT}, only {', '.join(schema.names) or 'none at all'}.")
    kind = schema.field(TEXT).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"the column {TEXT} of {path} contains {kind}, not strings.")
    return file


def read_group(file: pq.ParquetFile, path: Path, group: int) -> list[str]:
    """The documents of one row group."""
    try:
        texts = file.read_row_group(group, columns=[TEXT]).column(TEXT).to_pylist()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"row group {group} of {path} cannot be read ({first_line(error)}); copy or rebuild the file."
        ) from None
    if None in texts:
        raise DataError(f"row group {group} of {path} contains a document without text; rebuild the file.")
    return [str(text) for text in texts]


def inspect(paths: list[Path]) -> list[Shard]:
    """Open every shard once, so that a bad one is reported before training."""
    shards = []
    for path in paths:
        with open_shard(path) as file:
            meta = file.metadata
            groups = tuple(meta.row_group(i).num_rows for i in range(meta.num_row_groups))
            every_token = EVERY_TOKEN.items() <= (file.schema_arrow.metadata or {}).items()
        shards.append(Shard(path, groups, every_token, footer_digest(path)))
        if not sum(groups):
            raise DataError(f"{path} has no documents.")
    return shards


def footer_digest(path: Path) -> str:
    """A digest of a file's size and footer, which has the sizes, places and smallest and largest texts of all row groups."""
    with path.open("rb") as file:
        size = file.seek(-8, 2) + 8
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - length))
        return hashlib.sha256(b"%d " % size + file.read(length)).hexdigest()[:16]


def inspect_split(folder: Path, split: str) -> list[Shard]:
    """The verified shards of a split.

    Training evaluates later, so a bad validation shard is rejected now.
    """
    shards = inspect(split_paths(folder, split))
    if split == "train":
        inspect_split(folder, "val")
    return shards


def texts(paths: list[Path]) -> Iterator[str]:
    """Every document of the given shards, in order."""
    for path in paths:
        with open_shard(path) as file:
            for group in range(file.metadata.num_row_groups):
                yield from read_group(file, path, group)
