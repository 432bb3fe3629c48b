# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of the module shard_sync; and how a folder is served to other hosts, completed from them, and linked into a run."""

from __future__ import annotations

from typing import Any, Callable

from .._contract import validate
from .._contract.run_folder import MANIFEST
from .._kit.words import plural
from . import filling, server
from .chain import Chain, ShardPeer, Source
from .folder import (
    Digests,
    ManifestEntry,
    ShardsError,
    State,
    apply_links,
    check_space,
    compare,
    entries,
    files_below,
    listing,
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
from .request import ShardsOutcome, ShardsRequest

# ---------------------------------------------------------------------------------------------------------------------
# served, stopped: to the other hosts of the job


def serve(request: ShardsRequest) -> ShardsOutcome:
    """Serve the folder's files to the peers, also those that are still to come."""
    outcome = ShardsOutcome()
    options = request.options
    ports = options["ports"] or {"low": 0, "high": 0}
    settings = server.ServerSettings(
        request.host,
        request.path,
        request.manifest or load_manifest(request.path) or {},
        options["address"],
        ports["low"],
        ports["high"],
        sorted(options["allow"]),
        options["secret"],
        options["idle"],
    )
    state = server.running(settings.place)
    same = state is not None and server.is_same(settings)
    outcome.changed = not same
    outcome.before = _server_line(state)
    outcome.after = _server_line(state) if same else f"serving {request.path} on {settings.address}\n"
    if not same and not request.check:
        make_folder(request.path, request.host)
        server.stop(settings.place)
        with writing(request.path, request.host):
            # It offers only what has been read.
            digests = request.digests()
            compare(entries(settings.manifest), digests)
            digests.save()
        state = server.start(settings)
    outcome.more = _server(settings.host, settings.address, state if not request.check or same else None)
    return outcome


def stop(request: ShardsRequest) -> ShardsOutcome:
    """Stop the transfer's server and delete its secret; without a secret, those of all transfers."""
    outcome = ShardsOutcome()
    secret = request.options["secret"]
    state = None
    for place in [server.place_of(request.path, secret)] if secret else server.places(request.path):
        found = server.running(place)
        outcome.changed = outcome.changed or found is not None
        outcome.before += _server_line(found)
        state = found or state
        if not request.check:
            server.stop(place)
    outcome.more = _server(request.host, None, state)
    return outcome


def _server(host: str, address: str | None, state: server.ServerState | None) -> dict[str, object]:
    """The server as its peers see it, with its process."""
    state = state or {}
    found = {"host": host, "address": state.get("address") or address, "port": state.get("port")}
    return {"server": found, "pid": state.get("pid")}


def _server_line(state: server.ServerState | None) -> str:
    return f"serving on {state['address']}:{state['port']}, pid {state['pid']}\n" if state else ""


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
    digests = request.digests()
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
    options = request.options
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
    outcome.compare_names([run_path(one.path) for one in wanted])
    if outcome.changed and not request.check:
        make_folder(run_dir, request.host)
        outcome.more["links"] = apply_links(request.path, run_dir, links)
    return outcome


def _require_right(request: ShardsRequest, wanted: list[ManifestEntry]) -> None:
    digests = request.digests()
    wrong = [one for one in compare(wanted, digests) if one.state != "ok"]
    digests.save()
    if wrong:
        some = ", ".join(f"{one.entry.path} {one.state}" for one in wrong[:3])
        raise ShardsError(
            f"{request.host}: {plural(len(wrong), 'file')} of {request.path} do not match the manifest ({some}); "
            "sync the data set first (--tags data)"
        )


STATES: dict[str, Callable[[ShardsRequest], ShardsOutcome]] = {
    "imported": filling.import_folder,
    "fetched": filling.fetch,
    "described": filling.make_manifest,
    "served": serve,
    "synced": sync,
    "stopped": stop,
    "linked": link_run,
}
