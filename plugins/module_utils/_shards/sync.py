# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Describe a folder of shards, import it, fetch it, bring it in line with other hosts, link it into a run; one function each."""

from __future__ import annotations

import os

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.manifest import Manifest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import MANIFEST, TOKENIZER
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.urls import NO_CREDENTIALS, has_credentials
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import plural
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import url
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    Digests,
    Entry,
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
    save_manifest,
    sweep_parts,
    take_seeds,
    writing,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import Outcome, Request
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.pull import Peer, Puller, part_bytes

# ---------------------------------------------------------------------------------------------------------------------
# manifest: what is in the folder


def make_manifest(request: Request) -> Outcome:
    """Describes the folder as it is. A manifest that is already there stays the truth unless it is to be rebuilt."""
    outcome = Outcome()
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
    digests = Digests(request.path, believe=not request.full)
    found = [entry for entry in (digests.of(name) for name in names) if entry]
    made = manifest_of(request.id or os.path.basename(request.path), request.layout, found)
    outcome.manifest, outcome.after = made, listing(made)
    outcome.changed = made != kept
    if not request.check:
        digests.save()
        save_manifest(request.path, made)
    return outcome


def _require_files(request: Request, names: list[str]) -> None:
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


def import_folder(request: Request) -> Outcome:
    """Gives the chosen shards of an existing folder and its tokenizer a second name in the store; nothing is copied.

    Once the store has a manifest, that says what belongs to the data set, whatever the source holds today.
    """
    outcome = Outcome()
    kept = load_manifest(request.path)
    pairs = _chosen(request, kept)
    outcome.moved = [path for path in pairs if not _is_taken(request, kept, pairs[path], path)]
    # What the source held once is not what it holds.
    gone = [] if kept else [one for one in files_below(request.path, "data") if "/" not in one and one not in pairs]
    outcome.extra = gone
    outcome.bytes = sum(os.path.getsize(pairs[path]) for path in outcome.moved)
    lacking = set(outcome.moved)
    outcome.before = "".join(f"{path}\n" for path in sorted({*pairs, *gone}) if path not in lacking)
    outcome.after = "".join(f"{path}\n" for path in sorted(pairs))
    outcome.changed = bool(outcome.moved or gone)
    outcome.sources = {request.host: outcome.bytes} if outcome.bytes else {}
    outcome.more["files"] = sorted(pairs)
    if outcome.changed and not request.check:
        make_folder(os.path.join(request.path, "tokenizer"), request.host)
        for path in outcome.moved:
            link(pairs[path], os.path.join(request.path, path))
        for path in gone:
            os.unlink(os.path.join(request.path, path))
    return outcome


def _is_taken(request: Request, kept: Manifest | None, source: str, path: str) -> bool:
    """Whether the store has the file: of a data set that is described by its name, else only where it still is the source's."""
    target = os.path.join(request.path, path)
    return os.path.exists(target) if kept else is_link_to(source, target)


def _chosen(request: Request, kept: Manifest | None) -> dict[str, str]:
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


def _tokenizer_folder(request: Request, source: str) -> str:
    """The given folder, or the one in or beside the source; empty if there is none, so that one has to be trained."""
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


def fetch(request: Request) -> Outcome:
    """Downloads what is missing or broken of the first shards of a collection and its last one."""
    outcome = Outcome()
    options = request.options
    collection = url.Collection(request.host, options["url"], options["shards"], options["last_shard"])
    if has_credentials(collection.url):
        raise ShardsError(f"{request.host}: url is {NO_CREDENTIALS}")
    names = collection.names()
    kept = request.manifest or load_manifest(request.path)
    expected = {one.path: one.sha256 for one in entries(kept)} if kept else {}
    digests = Digests(request.path, believe=not request.full)
    for name in names:
        problem = _problem(request.path, name, digests, expected.get(name))
        if problem:
            outcome.moved.append(name)
            if problem != "missing":
                outcome.repaired[name] = problem
    outcome.changed = bool(outcome.moved)
    lacking = set(outcome.moved)  # of a whole collection there are thousands
    outcome.before = "".join(f"{name}\n" for name in names if name not in lacking)
    outcome.after = "".join(f"{name}\n" for name in names)
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


def sync(request: Request) -> Outcome:
    """Brings the folder to hold every file of the manifest with its digest, from whichever peer has it."""
    outcome = Outcome()
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
    digests = Digests(request.path, believe=not request.full)
    states = compare(wanted, digests)
    lacking = [one for one in states if one.state != "ok"]
    _describe(request, outcome, states, manifest)
    outcome.changed = bool(lacking) or kept != manifest
    if not request.check:
        with writing(request.path, request.host):
            _bring(request, outcome, lacking, digests)
            digests.save()
            save_manifest(request.path, manifest)
            sweep_parts(request.path)
    return outcome


def _describe(request: Request, outcome: Outcome, states: list[State], manifest: Manifest) -> None:
    lacking = [one for one in states if one.state != "ok"]
    outcome.moved = [one.entry.path for one in lacking]
    outcome.bytes = sum(one.entry.bytes for one in lacking)
    outcome.repaired = {one.entry.path: one.state for one in lacking if one.state != "missing"}
    outcome.before = "".join(
        _line(one.entry) if one.state == "ok" else f"{one.entry.path} {one.state}\n"
        for one in states
        if one.state != "missing"
    )
    outcome.after = listing(manifest)
    names = {one.entry.path for one in states}
    outcome.extra = [name for name in files_below(request.path, request.layout) if name not in names]
    if lacking:
        outcome.msg = f"{plural(len(lacking), 'file')}, {outcome.bytes} bytes to copy here"


def _line(entry: Entry) -> str:
    return f"{entry.path} {entry.bytes} {entry.sha256[:16]}\n"


def _bring(request: Request, outcome: Outcome, lacking: list[State], digests: Digests) -> None:
    """Own folders first, then the disk is looked at, then the network."""

    def from_here(path: str, count: int) -> None:
        outcome.sources[request.host] = outcome.sources.get(request.host, 0) + count

    lacking = take_seeds(request.path, lacking, request.options["seeds"], digests, from_here)
    outcome.bytes = sum(one.entry.bytes for one in lacking)
    if not lacking:
        return
    wanted = [one.entry for one in lacking]
    check_space(request.path, outcome.bytes - part_bytes(request.path, wanted), request.host)
    peers = [
        Peer(str(one["host"]), told.address(one["address"]), told.port(one["port"])) for one in request.options["peers"]
    ]
    options = request.options
    puller = Puller(
        request.host, digests, peers, options["secret"] or "", options["address"] or "", options["parallel"]
    )
    for one in puller.pull(wanted, options["timeout"]):
        outcome.sources[one.source] = outcome.sources.get(one.source, 0) + one.bytes


# ---------------------------------------------------------------------------------------------------------------------
# linked: what a run reads


def link_run(request: Request) -> Outcome:
    """Makes the run's data and tokenizer folders hold exactly the manifest's files, after a look at each digest."""
    outcome = Outcome()
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
    outcome.changed = bool(links.make or links.remove)
    targets = sorted(_run_names(wanted))
    outcome.before = "".join(f"{one}\n" for one in sorted((set(targets) - set(links.make)) | set(links.remove)))
    outcome.after = "".join(f"{one}\n" for one in targets)
    if outcome.changed and not request.check:
        make_folder(run_dir, request.host)
        outcome.more["links"] = apply_links(request.path, run_dir, links)
    return outcome


def _run_names(wanted: list[Entry]) -> list[str]:
    return [one.path if one.path.startswith("tokenizer/") else "data/" + one.path for one in wanted]


def _require_right(request: Request, wanted: list[Entry]) -> None:
    digests = Digests(request.path, believe=not request.full)
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


def to_state(request: Request) -> Outcome:
    """Bring the folder to the state that is asked for."""
    return STATES[request.options["state"]](request)
