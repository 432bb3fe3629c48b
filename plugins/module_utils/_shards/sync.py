# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Describe a folder of shards, import it, download it, sync it with other hosts, link it into a run; one function each."""

from __future__ import annotations

import os
from typing import Collection

from .._contract import validate
from .._contract.manifest import Manifest
from .._contract.run_folder import MANIFEST, TOKENIZER
from .._contract.urls import NO_CREDENTIALS, has_credentials
from .._kit.words import plural
from . import url
from .folder import (
    Digests,
    ManifestEntry,
    ShardsError,
    State,
    apply_links,
    check_space,
    choose,
    compare,
    entries,
    files_below,
    is_link_to,
    link,
    listing,
    load_manifest,
    make_folder,
    manifest_of,
    plan_links,
    run_path,
    save_manifest,
    sweep_parts,
    take_seeds,
    writing,
)
from .module import ShardsOutcome, ShardsRequest
from .pull import Puller, ShardPeer, part_bytes

# ---------------------------------------------------------------------------------------------------------------------
# manifest: what is in the folder


def make_manifest(request: ShardsRequest) -> ShardsOutcome:
    """Describe the folder. An existing manifest stays valid unless it should be rebuilt."""
    outcome = ShardsOutcome()
    kept = load_manifest(request.path)
    outcome.manifest = kept
    outcome.more["described"] = kept is not None
    outcome.before = outcome.after = listing(kept)
    if kept is not None and not request.options["refresh"]:
        return outcome
    names = files_below(request.path, request.layout)
    _require_files(request, names)
    if not names:
        outcome.msg = f"{request.path} holds no files yet"
        return outcome
    digests = Digests(request.path, use_stored=not request.full)
    found = [entry for entry in (digests.of(name) for name in names) if entry]
    made = manifest_of(request.id or os.path.basename(request.path), request.layout, found)
    outcome.manifest, outcome.after = made, listing(made)
    outcome.changed = made != kept
    if not request.check:
        digests.save()
        save_manifest(request.path, made)
    return outcome


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
    _compare_names(outcome, pairs)
    outcome.sources = {request.host: outcome.bytes} if outcome.bytes else {}
    outcome.more["files"] = sorted(pairs)
    if outcome.changed and not request.check:
        make_folder(os.path.join(request.path, "tokenizer"), request.host)
        for path in outcome.moved:
            link(pairs[path], os.path.join(request.path, path))
        for path in outcome.extra:
            os.unlink(os.path.join(request.path, path))
    return outcome


def _compare_names(outcome: ShardsOutcome, wanted: Collection[str]) -> None:
    """The diff between the wanted names and those already there, which are all but the moved ones, and extra ones."""
    lacking = set(outcome.moved)  # a whole collection has thousands
    there = [*(name for name in wanted if name not in lacking), *outcome.extra]
    outcome.before = "".join(f"{name}\n" for name in sorted(there))
    outcome.after = "".join(f"{name}\n" for name in sorted(wanted))
    outcome.changed = bool(outcome.moved or outcome.extra)


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
    digests = Digests(request.path, use_stored=not request.full)
    for name in names:
        problem = _problem(request.path, name, digests, expected.get(name))
        if problem:
            outcome.moved.append(name)
            if problem != "missing":
                outcome.repaired[name] = problem
    _compare_names(outcome, names)
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
# synced: from the other hosts of the job


def sync(request: ShardsRequest) -> ShardsOutcome:
    """Complete the folder with every file of the manifest, from any peer."""
    outcome = ShardsOutcome()
    manifest = request.manifest
    if manifest is None:
        if not request.check:
            raise ShardsError(f"{request.host}: there is no manifest for {request.path}")
        outcome.msg = "the files are unknown until the first host has made them"
        return outcome
    outcome.manifest = manifest
    wanted = entries(manifest)
    kept = load_manifest(request.path)
    if not request.check:
        make_folder(request.path, request.host)
    digests = Digests(request.path, use_stored=not request.full)
    states = compare(wanted, digests)
    lacking = [one for one in states if one.state != "ok"]
    _describe(request, outcome, states, lacking)
    outcome.after = listing(manifest)
    outcome.changed = bool(lacking) or kept != manifest
    if not request.check:
        with writing(request.path, request.host):
            _bring(request, outcome, [one.entry for one in lacking], digests)
            digests.save()
            save_manifest(request.path, manifest)
            sweep_parts(request.path)
    return outcome


def _describe(request: ShardsRequest, outcome: ShardsOutcome, states: list[State], lacking: list[State]) -> None:
    outcome.moved = [one.entry.path for one in lacking]
    outcome.bytes = sum(one.entry.bytes for one in lacking)
    outcome.repaired = {one.entry.path: one.state for one in lacking if one.state != "missing"}
    outcome.before = "".join(
        one.entry.line() if one.state == "ok" else f"{one.entry.path} {one.state}\n"
        for one in states
        if one.state != "missing"
    )
    names = {one.entry.path for one in states}
    outcome.extra = [name for name in files_below(request.path, request.layout) if name not in names]
    if lacking:
        outcome.msg = f"{plural(len(lacking), 'file')}, {outcome.bytes} bytes to copy here"


def _bring(request: ShardsRequest, outcome: ShardsOutcome, lacking: list[ManifestEntry], digests: Digests) -> None:
    """First other folders of this host, then a check of the disk, then the network."""
    wanted = take_seeds(lacking, request.options["seeds"], digests)
    outcome.bytes = sum(one.bytes for one in wanted)
    if len(wanted) < len(lacking):
        outcome.sources[request.host] = sum(one.bytes for one in lacking) - outcome.bytes
    if not wanted:
        return
    check_space(request.path, outcome.bytes - part_bytes(request.path, wanted), request.host)
    peers = [
        ShardPeer(str(one["host"]), validate.address(one["address"]), validate.port(one["port"]))
        for one in request.options["peers"]
    ]
    options = request.options
    puller = Puller(
        request.host, digests, peers, options["secret"] or "", options["address"] or "", options["parallel"]
    )
    for host, count in puller.pull(wanted, options["timeout"]).items():
        outcome.sources[host] = outcome.sources.get(host, 0) + count


# ---------------------------------------------------------------------------------------------------------------------
# linked: what a run reads


def link_run(request: ShardsRequest) -> ShardsOutcome:
    """Link exactly the manifest's files into the run's data and tokenizer folders, after verifying each digest."""
    outcome = ShardsOutcome()
    manifest = request.manifest or load_manifest(request.path)
    if manifest is None:
        if request.check:
            outcome.msg = "the files are unknown until the first host has made them"
            return outcome
        raise ShardsError(f"{request.host}: {request.path} has no {MANIFEST}; sync the data set first (--tags data)")
    outcome.manifest = manifest
    wanted = entries(manifest)
    run_dir = str(request.options["dest"])
    if not request.check:
        _require_right(request, wanted)
    links = plan_links(request.path, run_dir, wanted)
    outcome.moved, outcome.extra = links.make, links.remove
    _compare_names(outcome, [run_path(one.path) for one in wanted])
    if outcome.changed and not request.check:
        make_folder(run_dir, request.host)
        outcome.more["links"] = apply_links(request.path, run_dir, links)
    return outcome


def _require_right(request: ShardsRequest, wanted: list[ManifestEntry]) -> None:
    digests = Digests(request.path, use_stored=not request.full)
    wrong = [one for one in compare(wanted, digests) if one.state != "ok"]
    digests.save()
    if wrong:
        some = ", ".join(f"{one.entry.path} {one.state}" for one in wrong[:3])
        raise ShardsError(
            f"{request.host}: {plural(len(wrong), 'file')} of {request.path} do not match the manifest ({some}); "
            "sync the data set first (--tags data)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The states of the module shard_folder.

STATES = {"imported": import_folder, "fetched": fetch, "described": make_manifest, "linked": link_run}


def to_state(request: ShardsRequest) -> ShardsOutcome:
    """Bring the folder into the requested state."""
    return STATES[request.options["state"]](request)
