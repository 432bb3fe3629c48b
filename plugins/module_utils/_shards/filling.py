# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the first host gets a folder of shards: from a folder of its own or a URL; and the manifest that describes it. A function a state."""

from __future__ import annotations

import os

from .._contract.manifest import Manifest
from .._contract.run_folder import TOKENIZER
from .._contract.urls import NO_CREDENTIALS, has_credentials
from .._kit.words import plural
from . import url
from .folder import (
    Digests,
    ManifestEntry,
    ShardsError,
    choose,
    entries,
    files_below,
    is_link_to,
    link,
    listing,
    load_manifest,
    make_folder,
    manifest_of,
    save_manifest,
    writing,
)
from .request import ShardsOutcome, ShardsRequest

# ---------------------------------------------------------------------------------------------------------------------
# imported: from an existing folder of the same host


def import_folder(request: ShardsRequest) -> ShardsOutcome:
    """Link the chosen shards of an existing folder and its tokenizer into the store, without copying.

    Once the store has a manifest, that decides what belongs to the data set, whatever the source contains today.
    """
    outcome = ShardsOutcome()
    kept = load_manifest(request.path)
    pairs = _chosen(request, kept)
    outcome.moved = [path for path in pairs if not _is_taken(request, kept, pairs[path], path)]
    # The source may have changed since.
    there = [] if kept else files_below(request.path, "data")
    outcome.extra = [path for path in there if "/" not in path and path not in pairs]
    outcome.bytes = sum(os.path.getsize(pairs[path]) for path in outcome.moved)
    outcome.compare_names(pairs)
    outcome.sources = {request.host: outcome.bytes} if outcome.bytes else {}
    outcome.more["files"] = sorted(pairs)
    if outcome.changed and not request.check:
        make_folder(os.path.join(request.path, "tokenizer"), request.host)
        for path in outcome.moved:
            link(pairs[path], os.path.join(request.path, path))
        for path in outcome.extra:
            os.unlink(os.path.join(request.path, path))
    return outcome


def _is_taken(request: ShardsRequest, kept: Manifest | None, source: str, path: str) -> bool:
    """Whether the store has the file: by name if the data set has a manifest, otherwise only if it is still the source's file."""
    target = os.path.join(request.path, path)
    return os.path.exists(target) if kept else is_link_to(source, target)


def _chosen(request: ShardsRequest, kept: Manifest | None) -> dict[str, str]:
    """Path in the store -> file of the source."""
    source = str(request.options["source"])
    tokenizer = _tokenizer_folder(request, source)
    pairs = {"tokenizer/" + name: os.path.join(tokenizer, name) for name in TOKENIZER} if tokenizer else {}
    if kept is not None:
        pairs.update({one.path: os.path.join(source, one.path) for one in entries(kept) if "/" not in one.path})
        return {path: origin for path, origin in pairs.items() if os.path.isfile(origin)}
    shards = [name for name in files_below(source, "data") if not name.startswith("tokenizer/")]
    wanted = int(request.options["shards"])
    if wanted > len(shards) or not shards:
        raise ShardsError(
            f"{request.host}: {source} holds {plural(len(shards), 'shard')} (*.parquet), but {max(wanted, 2)} are wanted; "
            "ask for fewer (ddp_data_shards), add shards there, or name another folder (ddp_data_paths)"
        )
    return {**{name: os.path.join(source, name) for name in choose(shards, wanted)}, **pairs}


def _tokenizer_folder(request: ShardsRequest, source: str) -> str:
    """The given folder, or the one in or beside the source; empty if a tokenizer must be trained."""
    given = request.options["tokenizer"]
    tried = (
        [given] if given else [os.path.join(source, "tokenizer"), os.path.join(os.path.dirname(source), "tokenizer")]
    )
    for folder in tried:
        if all(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER):
            return str(folder)
    if given:
        raise ShardsError(
            f"{request.host}: {given} holds no tokenizer ({' and '.join(TOKENIZER)}); name the folder that does"
        )
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# fetched: from the base URL of a collection


def fetch(request: ShardsRequest) -> ShardsOutcome:
    """Download missing or broken files of a collection's first shards and its last one."""
    outcome = ShardsOutcome()
    options = request.options
    collection = url.Collection(request.host, options["url"], options["shards"], options["last_shard"])
    if has_credentials(collection.url):
        raise ShardsError(f"{request.host}: url is {NO_CREDENTIALS}")
    names = collection.names()
    kept = request.manifest or load_manifest(request.path)
    expected = {one.path: one.sha256 for one in entries(kept)} if kept else {}
    digests = request.digests()
    for name in names:
        problem = _problem(request.path, name, digests, expected.get(name))
        if problem:
            outcome.moved.append(name)
            if problem != "missing":
                outcome.repaired[name] = problem
    outcome.compare_names(names)
    outcome.msg = f"{plural(len(outcome.moved), 'shard')} to fetch from {collection.url}" if outcome.moved else ""
    if request.check:
        return outcome
    if outcome.moved:
        make_folder(request.path, request.host)
        with writing(request.path, request.host):
            outcome.bytes = url.fetch_all(
                collection, outcome.moved, digests, expected, options["parallel"], options["retries"]
            )
        outcome.sources = {collection.url: outcome.bytes}
    digests.save()
    return outcome


def _problem(folder: str, name: str, digests: Digests, sha256: str | None) -> str:
    full = os.path.join(folder, name)
    if not os.path.isfile(full):
        return "missing"
    if url.parquet_problem(full):
        return "truncated"
    found = digests.of(name)
    return "" if sha256 is None or (found and found.sha256 == sha256) else "corrupted"


# ---------------------------------------------------------------------------------------------------------------------
# described: what is in the folder


def make_manifest(request: ShardsRequest) -> ShardsOutcome:
    """Describe the folder. An existing manifest stays valid unless it should be rebuilt."""
    outcome = ShardsOutcome()
    kept = load_manifest(request.path)
    outcome.manifest = kept
    whole = kept is not None and all(one.is_in_pieces() for one in entries(kept))
    outcome.more["described"] = whole
    outcome.before = outcome.after = listing(kept)
    if whole and not request.options["refresh"]:
        return outcome
    digests, layout = request.digests(), request.layout
    if kept is None or request.options["refresh"]:
        names = files_below(request.path, layout)
        _require_files(request, names)
        if not names:
            outcome.msg = f"{request.path} holds no files yet"
            return outcome
        name = request.options["id"] or os.path.basename(request.path)
        found = [entry for entry in map(digests.in_pieces, names) if entry]
    else:
        name, layout = str(kept.get("id")), "files" if "files" in kept else "data"
        found = [_in_pieces(one, digests) for one in entries(kept)]
    made = manifest_of(name, layout, found)
    outcome.manifest, outcome.after = made, listing(made)
    outcome.changed = made != kept
    if not request.check:
        digests.save()
        save_manifest(request.path, made)
    return outcome


def _in_pieces(entry: ManifestEntry, digests: Digests) -> ManifestEntry:
    """The manifest's entry with its pieces, if the file is as described."""
    found = digests.in_pieces(entry.path)
    return found if found and found.sha256 == entry.sha256 else entry


def _require_files(request: ShardsRequest, names: list[str]) -> None:
    if request.check and not os.path.isdir(request.path):
        return
    shards = [name for name in names if name.endswith(".parquet")]
    if not names or (request.layout == "data" and not shards):
        kind = "*.parquet files" if request.layout == "data" else "files"
        raise ShardsError(f"{request.host}: {request.path} holds no {kind}, so there is nothing to describe")
    if request.layout == "data" and len(shards) < 2:
        raise ShardsError(
            f"{request.host}: {request.path} holds only {shards[0]}; at least two shards are needed, since the last "
            "one is kept for validation"
        )
    missing = [name for name in TOKENIZER if "tokenizer/" + name not in names]
    if request.layout == "data" and missing:
        raise ShardsError(
            f"{request.host}: {os.path.join(request.path, 'tokenizer')} lacks {' and '.join(missing)}; "
            "train a tokenizer first (python -m scripts.tok_train) or name the folder that holds one"
        )
