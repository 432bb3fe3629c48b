# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make parquet shards from folders of text files.

    python -m scripts.make_shards --from PATH... --out FOLDER --shards 8 --suffix .txt .md

Every readable text file becomes a document; long ones are split at line ends, so that their parts can be mixed. The shards carry
a mark: our trainer reads each of their tokens once per epoch (other trainers begin each row with a document, and drop the rest of
those that are longer). Documents are ordered by their digests, so the same texts give the same shards
in any folder, and training and validation are sampled alike. The last shard is validation. With --prose, of Python files only the
longer texts in them count: docstrings and help, which are English on every machine.
The output folder appears whole or not at all.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet as pq

from nanochat.data.dataset import EVERY_TOKEN, TEXT
from nanochat.kit.common import UserError, exit_code
from nanochat.kit.settings import Parser, at_least

# Packages installed inside Python's own library are many times its size and differ between machines.
PACKAGES = ("site-packages", "dist-packages")
# For --prose: tests have more text than the rest, but hardly any prose, and compiled files none.
TESTS = ("test", "tests", "idlelib", "__pycache__")
LEAST_PROSE = 60  # characters
# Letters and spaces in prose; tables and samples of code have fewer.
PROSE_LETTERS = 0.85
LONGEST = 10_000  # characters of a document
# The ranks of a checkout share a shard by row groups, so a shard should have many.
FEWEST_GROUPS, DOCS_PER_GROUP = 16, 64


def list_files(sources: Sequence[Path], suffixes: Sequence[str], left_out: Sequence[str]) -> list[Path]:
    """Every regular file under the sources, without hidden files and outside links."""
    files: list[Path] = []

    def stop(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}.") from None

    for source in sources:
        if source.is_file():
            files.append(source)
            continue
        if not source.is_dir():
            raise UserError(f"--from {source}: neither a file nor a folder.")
        for root, folders, names in os.walk(source, onerror=stop):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
            paths = (Path(root, name) for name in sorted(names) if not name.startswith("."))
            regular = (path for path in paths if path.is_file() and not path.is_symlink())
            files.extend(path for path in regular if not suffixes or path.suffix in suffixes)
    return files


def cut(text: str, longest: int = LONGEST) -> list[str]:
    """Split a text into pieces of at most `longest` characters, at line breaks if possible."""
    pieces, begin = [], 0
    while len(text) - begin > longest:
        line_end = text.rfind("\n", begin, begin + longest) + 1
        end = line_end if line_end > begin else begin + longest
        pieces.append(text[begin:end])
        begin = end
    return [*pieces, text[begin:]]


def prose(program: str) -> str:
    """The longer texts in a Python program."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    texts = [inspect.cleandoc(text) for text in constants if isinstance(text, str) and len(text) >= LEAST_PROSE]
    letters = {text: sum(character.isalpha() or character.isspace() for character in text) for text in texts}
    return "\n\n".join(text for text in texts if letters[text] > PROSE_LETTERS * len(text))


def read_documents(files: Sequence[Path], only_prose: bool) -> tuple[list[str], int]:
    """The texts of all files, in an order that depends only on their content, and how many files have none."""
    documents: list[str] = []
    skipped = 0
    for path in files:
        text = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_bytes().decode("utf-8-sig")
        if only_prose and path.suffix == ".py":
            text = prose(text)
        pieces = [] if "\0" in text else [piece for piece in cut(text) if piece.strip()]
        documents += pieces
        skipped += not pieces
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    return documents, skipped


def write_shards(documents: Sequence[str], folder: Path, shards: int, docs_per_group: int = DOCS_PER_GROUP) -> None:
    """Write the documents in equal runs, one per shard."""
    for number in range(shards):
        begin, end = (len(documents) * n // shards for n in (number, number + 1))
        group = max(1, min(docs_per_group, (end - begin) // FEWEST_GROUPS))
        table = pa.table({TEXT: pa.array(documents[begin:end], pa.string())}, metadata=EVERY_TOKEN)
        path = folder / f"shard_{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=group, compression="zstd")
        with path.open("rb") as file:
            os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m scripts.make_shards", description="Make shards from text files.")
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", required=True, help="folders or files of text")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty or new")
    parser.add_argument("--shards", type=at_least(2), required=True, help="number of shards; the last is validation")
    parser.add_argument("--suffix", nargs="*", default=[], help="only files with these endings (default: all)")
    parser.add_argument("--prose", action="store_true", help="of Python files only docstrings and help")
    args = parser.parse_args(argv)
    try:
        make(args)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or args.out}: {error.strerror or error}.") from None


def make(args: Namespace) -> None:
    """Read, write to a folder beside the target, then rename it."""
    out: Path = args.out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: is not empty; use a new folder, or remove this one first.")
    suffixes = [suffix if suffix.startswith(".") else "." + suffix for suffix in args.suffix]
    left_out = (*PACKAGES, *TESTS) if args.prose else PACKAGES
    files = list_files(args.sources, suffixes, left_out)
    documents, skipped = read_documents(files, args.prose)
    if len(documents) < args.shards:
        raise UserError(
            f"{' '.join(map(str, args.sources))} gave {len(documents)} document(s) from {len(files)} file(s), "
            f"too few for {args.shards} shards; add text, lower --shards or change --suffix."
        )
    fresh = out.with_name(f".{out.name}.new-{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        write_shards(documents, fresh, args.shards)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    print(
        f"wrote {args.shards} shards with {len(documents)} documents of {sum(map(len, documents))} characters to {args.out}; "
        f"{skipped} of {len(files)} files are no readable UTF-8 text, or empty"
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
