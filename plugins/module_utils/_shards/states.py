# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of the module shard_sync, a function each: how the first host gets a folder of shards and describes it, how a folder is
served to other hosts, completed from them, and linked into a run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Collection, Mapping, NamedTuple

from .._contract import validate
from .._contract.run_folder import MANIFEST, TOKENIZER
from .._contract.urls import NO_CREDENTIALS, has_credentials
from .._kit.words import plural
from . import server, url
from .chain import Chain, ShardPeer, Source
from .folder import (
    Digests,
    Linking,
    Manifest,
    ManifestEntry,
    ShardsError,
    apply_links,
    check_space,
    compare,
    files_below,
    links_of_run,
    load_manifest,
    make_folder,
    part_bytes,
    plan_links,
    run_path,
    save_manifest,
    sweep_parts,
    take_seeds,
    writing,
)

UNKNOWN_YET = "the files are unknown until the first host has made them"


class ShardsRequest(NamedTuple):
    """The module's validated options."""

    host: str
    path: str
    check: bool
    options: Mapping[str, Any]

    def manifest(self) -> Manifest | None:
        """The given one; by default, except where it is brought from other hosts, the folder's own."""
        given = self.options["manifest"]
        return Manifest.read(given) if given is not None else load_manifest(self.path)

    def digests(self) -> Digests:
        """Those of the folder's files; with verify=full all of them are read."""
        return Digests(self.path, use_stored=self.options["verify"] != "full")


@dataclasses.dataclass
class ShardsOutcome:
    """The module's result, with the same keys whether or not something changed."""

    changed: bool = False
    manifest: Manifest | None = None
    moved: list[str] = dataclasses.field(default_factory=list)
    bytes: int = 0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    repaired: dict[str, str] = dataclasses.field(default_factory=dict)
    extra: list[str] = dataclasses.field(default_factory=list)
    before: str = ""
    after: str = ""
    msg: str = ""
    more: dict[str, object] = dataclasses.field(default_factory=dict)

    def compare_names(self, wanted: Collection[str]) -> None:
        """The diff between the wanted names and those already there, which are all but the moved ones, and extra ones."""
        lacking = set(self.moved)  # a whole collection has thousands
        there = [*(name for name in wanted if name not in lacking), *self.extra]
        self.before = "".join(f"{name}\n" for name in sorted(there))
        self.after = "".join(f"{name}\n" for name in sorted(wanted))
        self.changed = bool(self.moved or self.extra)

    def as_result(self) -> dict[str, object]:
        return {
            "changed": self.changed,
            "manifest": self.manifest.document() if self.manifest else None,
            "digest": self.manifest.digest() if self.manifest else None,
            "moved": self.moved,
            "bytes": self.bytes,
            "from": self.sources,
            "repaired": self.repaired,
            "extra": self.extra,
            "msg": self.msg,
            "diff": {"before": self.before, "after": self.after},
            **self.more,
        }


# ---------------------------------------------------------------------------------------------------------------------
# imported: from an existing folder of the same host


def import_folder(request: ShardsRequest) -> ShardsOutcome:
    """Link the chosen shards of an existing folder and its tokenizer into the store, without copying; a described store stays as it is."""
    if load_manifest(request.path):
        return ShardsOutcome(more={"files": []})
    pairs = _chosen(request)
    there = [name for name in files_below(request.path, "data") if "/" not in name]
    outcome = _link(request, request.path, plan_links(request.path, pairs, there), pairs)
    outcome.bytes = sum(os.path.getsize(pairs[path]) for path in outcome.moved)
    outcome.sources = {request.host: outcome.bytes} if outcome.bytes else {}
    outcome.more["files"] = sorted(pairs)
    return outcome


def _link(request: ShardsRequest, folder: str, links: Linking, wanted: Collection[str]) -> ShardsOutcome:
    """Give the folder exactly the wanted files."""
    outcome = ShardsOutcome(moved=list(links.make), extra=links.remove)
    outcome.compare_names(wanted)
    if outcome.changed and not request.check:
        make_folder(folder, request.host)
        apply_links(folder, links)
    return outcome


def _chosen(request: ShardsRequest) -> dict[str, str]:
    """Path in the store -> file of the source."""
    source, wanted = str(request.options["source"]), int(request.options["shards"])
    tokenizer = _tokenizer_folder(request, source)
    shards = [name for name in files_below(source, "data") if not name.startswith("tokenizer/")]
    if wanted > len(shards) or not shards:
        raise ShardsError(
            f"{request.host}: {source} holds {plural(len(shards), 'shard')} (*.parquet), but {max(wanted, 2)} are wanted; "
            "ask for fewer (ddp_data_shards), add shards there, or name another folder (ddp_data_paths)"
        )
    return {
        # The last one is for validation.
        **{name: os.path.join(source, name) for name in (shards[: wanted - 1] + shards[-1:] if wanted else shards)},
        **{"tokenizer/" + name: os.path.join(tokenizer, name) for name in TOKENIZER if tokenizer},
    }


def _tokenizer_folder(request: ShardsRequest, source: str) -> str:
    """The given folder, or the one in or beside the source; empty if a tokenizer must be trained."""
    given = request.options["tokenizer"]
    for folder in [given] if given else [os.path.join(one, "tokenizer") for one in (source, os.path.dirname(source))]:
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
    """Download missing or broken files of a collection."""
    base, names = str(request.options["url"]), [validate.file_path(name) for name in request.options["names"]]
    if has_credentials(base):
        raise ShardsError(f"{request.host}: url is {NO_CREDENTIALS}")
    kept = request.manifest()
    expected = {one.path: one.sha256 for one in kept.files} if kept else {}
    digests = request.digests()
    problems = {name: _problem(request.path, name, digests, expected.get(name)) for name in names}
    outcome = ShardsOutcome(moved=[name for name in names if problems[name]])
    outcome.repaired = {name: what for name, what in problems.items() if what not in ("", "missing")}
    outcome.compare_names(names)
    outcome.msg = f"{plural(len(outcome.moved), 'shard')} to fetch from {base}" if outcome.moved else ""
    if request.check:
        return outcome
    if outcome.moved:
        make_folder(request.path, request.host)
        with writing(request.path, request.host):
            outcome.bytes = url.fetch_all(request.host, base, outcome.moved, digests, expected)
        outcome.sources = {base: outcome.bytes}
    digests.save()
    return outcome


def _problem(folder: str, name: str, digests: Digests, sha256: str | None) -> str:
    full = os.path.join(folder, name)
    if not os.path.isfile(full):
        return "missing"
    if url.parquet_problem(full):
        return "truncated"
    return "corrupted" if digests.of(name) != (sha256 or digests.of(name)) else ""


# ---------------------------------------------------------------------------------------------------------------------
# described: what is in the folder


def describe(request: ShardsRequest) -> ShardsOutcome:
    """Describe the folder. An existing manifest stays valid unless it should be rebuilt."""
    kept, options = load_manifest(request.path), request.options
    whole = kept is not None and all(one.is_in_pieces() for one in kept.files)
    outcome = ShardsOutcome(manifest=kept, more={"described": whole})
    outcome.before = outcome.after = kept.listing() if kept else ""
    if whole and not options["refresh"]:
        return outcome
    names = files_below(request.path, options["layout"])
    _require_files(request, names)
    if not names:
        outcome.msg = f"{request.path} holds no files yet"
        return outcome
    digests = request.digests()
    made = Manifest(options["id"] or os.path.basename(request.path), [digests.described(name) for name in names])
    if kept and not options["refresh"] and made.digest() != kept.digest():
        return outcome  # it is not for its pieces that a data set changes
    outcome.manifest, outcome.after, outcome.changed = made, made.listing(), made != kept
    if not request.check:
        digests.save()
        save_manifest(request.path, made)
    return outcome


def _require_files(request: ShardsRequest, names: list[str]) -> None:
    if request.check and not os.path.isdir(request.path):
        return
    is_data = request.options["layout"] == "data"
    shards = [name for name in names if name.endswith(".parquet")]
    if not names or (is_data and not shards):
        kind = "*.parquet files" if is_data else "files"
        raise ShardsError(f"{request.host}: {request.path} holds no {kind}, so there is nothing to describe")
    if is_data and len(shards) < 2:
        raise ShardsError(
            f"{request.host}: {request.path} holds only {shards[0]}; at least two shards are needed, since the last "
            "one is kept for validation"
        )
    missing = [name for name in TOKENIZER if "tokenizer/" + name not in names]
    if is_data and missing:
        raise ShardsError(
            f"{request.host}: {os.path.join(request.path, 'tokenizer')} lacks {' and '.join(missing)}; "
            "train a tokenizer first (python -m scripts.tok_train) or name the folder that holds one"
        )


# ---------------------------------------------------------------------------------------------------------------------
# served, stopped: to the other hosts of the job


def serve(request: ShardsRequest) -> ShardsOutcome:
    """Serve the folder's files to the peers, also those that are still to come."""
    options = request.options
    settings = server.ServerSettings(
        request.host,
        request.path,
        request.manifest() or Manifest("", []),
        options["address"],
        options["ports"]["low"] if options["ports"] else 0,
        options["ports"]["high"] if options["ports"] else 0,
        sorted(options["allow"]),
        options["secret"],
        options["idle"],
    )
    state = server.running(settings.place)
    same = state is not None and state.get("settings") == server.fingerprint(settings)
    outcome = ShardsOutcome(changed=not same, before=_server_line(state))
    outcome.after = outcome.before if same else f"serving {request.path} on {settings.address}\n"
    if not same and not request.check:
        make_folder(request.path, request.host)
        server.stop(settings.place)
        with writing(request.path, request.host):
            # It offers only what has been read.
            digests = request.digests()
            compare(settings.manifest.files, digests)
            digests.save()
        state = server.start(settings)
    port = state["port"] if state and (same or not request.check) else None
    outcome.more = {"server": {"host": settings.host, "address": settings.address, "port": port}}
    return outcome


def stop(request: ShardsRequest) -> ShardsOutcome:
    """Stop the transfer's server and forget its secret; without a secret, those of all transfers."""
    secret = request.options["secret"]
    places = [server.place_of(request.path, secret)] if secret else server.places(request.path)
    outcome = ShardsOutcome(before="".join(_server_line(server.running(place)) for place in places))
    outcome.changed = outcome.before != ""
    if not request.check:
        for place in places:
            server.stop(place)
    return outcome


def _server_line(state: server.ServerState | None) -> str:
    return f"serving on {state['address']}:{state['port']}, pid {state['pid']}\n" if state else ""


# ---------------------------------------------------------------------------------------------------------------------
# synced: from the other hosts of the job


def sync(request: ShardsRequest) -> ShardsOutcome:
    """Complete the folder with every file of the manifest, from any peer."""
    if request.options["manifest"] is None:
        if request.check:
            return ShardsOutcome(msg=UNKNOWN_YET)
        raise ShardsError(f"{request.host}: there is no manifest for {request.path}")
    manifest = Manifest.read(request.options["manifest"])
    kept = load_manifest(request.path)
    if not request.check:
        make_folder(request.path, request.host)
    digests = request.digests()
    states = compare(manifest.files, digests)
    lacking = [entry for entry, state in states.items() if state != "ok"]
    outcome = ShardsOutcome(changed=bool(lacking) or kept != manifest, manifest=manifest, after=manifest.listing())
    _foretell(request, outcome, states, lacking)
    if not request.check:
        with writing(request.path, request.host):
            _bring(request, outcome, lacking, digests)
            digests.save()
            save_manifest(request.path, manifest)
            sweep_parts(request.path)
    return outcome


def _foretell(
    request: ShardsRequest, outcome: ShardsOutcome, states: dict[ManifestEntry, str], lacking: list[ManifestEntry]
) -> None:
    """Say what is to be brought."""
    outcome.moved = [entry.path for entry in lacking]
    outcome.bytes = sum(entry.bytes for entry in lacking)
    outcome.repaired = {entry.path: states[entry] for entry in lacking if states[entry] != "missing"}
    there = {entry: state for entry, state in states.items() if state != "missing"}
    outcome.before = "".join(
        entry.line() if state == "ok" else f"{entry.path} {state}\n" for entry, state in there.items()
    )
    names = {entry.path for entry in states}
    outcome.extra = [name for name in files_below(request.path, request.options["layout"]) if name not in names]
    if lacking:
        outcome.msg = f"{plural(len(lacking), 'file')}, {outcome.bytes} bytes to copy here"


def _bring(request: ShardsRequest, outcome: ShardsOutcome, lacking: list[ManifestEntry], digests: Digests) -> None:
    """First other folders of this host, then a check of the disk, then the network."""
    options = request.options
    wanted = take_seeds(lacking, options["seeds"], digests)
    outcome.bytes = sum(one.bytes for one in wanted)
    if len(wanted) < len(lacking):
        outcome.sources[request.host] = sum(one.bytes for one in lacking) - outcome.bytes
    if not wanted:
        return
    check_space(request.path, outcome.bytes - part_bytes(request.path, wanted), request.host)
    before, behind = (
        [Source(peer, options["secret"] or "", options["address"] or "") for peer in peers]
        for peers in around(request.host, options["peers"])
    )
    received = Chain(request.host, digests, before, behind, options["timeout"]).pull(wanted)
    for host, count in received.items():
        outcome.sources[host] = outcome.sources.get(host, 0) + count


def around(host: str, chain: list[dict[str, Any]]) -> tuple[list[ShardPeer], list[ShardPeer]]:
    """The hosts before this one in the chain, the nearest first, and those behind it."""
    peers = [ShardPeer(str(one["host"]), validate.address(one["address"]), validate.port(one["port"])) for one in chain]
    own = next((number for number, peer in enumerate(peers) if peer.host == host), len(peers))
    return peers[:own][::-1], peers[own + 1 :]


# ---------------------------------------------------------------------------------------------------------------------
# linked: what a run reads


def link_run(request: ShardsRequest) -> ShardsOutcome:
    """Link exactly the manifest's files into the run's data and tokenizer folders, after verifying each digest."""
    manifest, run_dir = request.manifest(), str(request.options["dest"])
    if manifest is None:
        if request.check:
            return ShardsOutcome(msg=UNKNOWN_YET)
        raise ShardsError(f"{request.host}: {request.path} has no {MANIFEST}; sync the data set first (--tags data)")
    if not request.check:
        _require_right(request, manifest)
    links = links_of_run(request.path, run_dir, manifest.files)
    outcome = _link(request, run_dir, links, [run_path(one.path) for one in manifest.files])
    outcome.manifest = manifest
    return outcome


def _require_right(request: ShardsRequest, manifest: Manifest) -> None:
    digests = request.digests()
    wrong = [f"{entry.path} {state}" for entry, state in compare(manifest.files, digests).items() if state != "ok"]
    digests.save()
    if wrong:
        raise ShardsError(
            f"{request.host}: {plural(len(wrong), 'file')} of {request.path} do not match the manifest ({', '.join(wrong[:3])}); "
            "sync the data set first (--tags data)"
        )


STATES: dict[str, Callable[[ShardsRequest], ShardsOutcome]] = {
    "imported": import_folder,
    "fetched": fetch,
    "described": describe,
    "served": serve,
    "synced": sync,
    "stopped": stop,
    "linked": link_run,
}
