# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The states of a folder of shards, for the module shard_sync and the agent, a function each: how the first host gets a folder and
describes it, how it is served to other hosts, completed from them, and linked into a run. `fetched` is in url.py: it takes Ansible."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Collection, Mapping, NamedTuple

from .._contract import validate
from .._contract.document import Document, digest_of
from .._contract.run_folder import MANIFEST, TOKENIZER
from .._kit.files import Busy
from .._kit.words import plural
from . import server
from .chain import Chain, ShardPeer, Source
from .folder import (
    Digests,
    Manifest,
    ManifestEntry,
    ShardsError,
    compare,
    data_files,
    is_link_to,
    link_exactly,
    load_manifest,
    make_folder,
    names_in,
    part_bytes,
    run_path,
    save_manifest,
    sweep_parts,
    take_seed,
    writing,
)

PORT = {"type": "int", "required": True}
# Parameters of shard_sync.
OPTIONS: dict[str, dict[str, Any]] = {
    "path": {"type": "path", "required": True},
    "host": {"type": "str"},
    "state": {"type": "str", "default": "synced"},
    "manifest": {"type": "dict"},
    "source": {"type": "path"},
    "tokenizer": {"type": "path"},
    "url": {"type": "str"},
    "names": {"type": "list", "elements": "str"},
    "shards": {"type": "int", "default": 0},
    "address": {"type": "str"},
    "ports": {"type": "dict", "options": {"low": PORT, "high": PORT}},
    "allow": {"type": "list", "elements": "str"},
    "secret": {"type": "str", "no_log": True},
    "peers": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "host": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": PORT,
        },
    },
    "seeds": {"type": "list", "elements": "path", "default": []},
    "dest": {"type": "path"},
}
UNKNOWN_YET = "the files are unknown until the first host has made them"


class ShardsRequest(NamedTuple):
    """A folder and what it shall become; options: those of the module, all of them."""

    host: str
    path: str
    check: bool
    options: Mapping[str, Any]

    def manifest(self) -> Manifest | None:
        """The given one, or the folder's own; None if it has none yet and this is check mode."""
        given = self.options["manifest"]
        found = Manifest.read(given) if given is not None else load_manifest(self.path)
        if found is None and not self.check:
            raise ShardsError(f"{self.path} has no {MANIFEST}; sync the data set first (--tags data)")
        return found


@dataclasses.dataclass
class ShardsOutcome:
    """The result of a state, with the same keys whether or not something changed."""

    changed: bool = False
    manifest: Manifest | None = None
    moved: list[str] = dataclasses.field(default_factory=list)
    bytes: int = 0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    repaired: dict[str, str] = dataclasses.field(default_factory=dict)
    before: str = ""
    after: str = ""
    msg: str = ""
    more: dict[str, object] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_names(cls, wanted: Collection[str], moved: list[str], extra: list[str]) -> ShardsOutcome:
        """A folder gets exactly the wanted names: all are there but the moved ones, and extra ones are removed."""
        lacking = set(moved)  # a whole collection has thousands
        there = [*(name for name in wanted if name not in lacking), *extra]
        before, after = ("".join(f"{name}\n" for name in sorted(names)) for names in (there, wanted))
        return cls(bool(moved or extra), moved=moved, before=before, after=after)

    def as_result(self) -> dict[str, object]:
        return {
            "changed": self.changed,
            "manifest": self.manifest.document() if self.manifest else None,
            "digest": self.manifest.digest() if self.manifest else None,
            "moved": self.moved,
            "bytes": self.bytes,
            "from": self.sources,
            "repaired": self.repaired,
            "msg": self.msg,
            "diff": {"before": self.before, "after": self.after},
            **self.more,
        }


def import_folder(request: ShardsRequest) -> ShardsOutcome:
    """Link the chosen shards of an existing folder and its tokenizer into the store, without copying; a described store stays as it is."""
    if load_manifest(request.path):
        return ShardsOutcome(more={"files": []})
    chosen = _chosen(request)
    there = [name for name in data_files(request.path) if "/" not in name]
    outcome = _link(request, request.path, chosen, there)
    outcome.bytes = sum(os.path.getsize(chosen[path]) for path in outcome.moved)
    outcome.sources = {request.host: outcome.bytes} if outcome.bytes else {}
    outcome.more["files"] = sorted(chosen)
    return outcome


def _link(request: ShardsRequest, folder: str, wanted: Mapping[str, str], there: list[str]) -> ShardsOutcome:
    """Give a folder exactly the wanted links, by path the file that it leads to."""
    make = {path: source for path, source in wanted.items() if not is_link_to(source, os.path.join(folder, path))}
    extra = [path for path in there if path not in wanted]
    outcome = ShardsOutcome.of_names(wanted, list(make), extra)
    if outcome.changed and not request.check:
        make_folder(folder)
        link_exactly(folder, make, extra)
    return outcome


def _chosen(request: ShardsRequest) -> dict[str, str]:
    """Path in the store -> file of the source."""
    source, wanted = str(request.options["source"]), int(request.options["shards"])
    shards = [name for name in data_files(source) if not name.startswith("tokenizer/")]
    if wanted > len(shards) or not shards:
        raise ShardsError(
            f"{source} holds {plural(len(shards), 'shard')} (*.parquet), but {max(wanted, 2)} are wanted; "
            "ask for fewer (ddp_data_shards), add shards there, or name another folder (ddp_data_paths)"
        )
    # The last one is for validation.
    found = {name: os.path.join(source, name) for name in (shards[: wanted - 1] + shards[-1:] if wanted else shards)}
    given = request.options["tokenizer"]
    for folder in [given] if given else [os.path.join(one, "tokenizer") for one in (source, os.path.dirname(source))]:
        if all(os.path.isfile(os.path.join(folder, name)) for name in TOKENIZER):
            return {**found, **{"tokenizer/" + name: os.path.join(folder, name) for name in TOKENIZER}}
    if given:
        raise ShardsError(f"{given} holds no tokenizer ({' and '.join(TOKENIZER)}); name the folder that does")
    return found  # one will be trained


def describe(request: ShardsRequest) -> ShardsOutcome:
    """Describe the folder; an existing manifest stays valid."""
    if kept := load_manifest(request.path):
        listing = kept.listing()
        return ShardsOutcome(manifest=kept, before=listing, after=listing)
    names, digests = data_files(request.path), Digests(request.path)
    shards = [name for name in names if name.endswith(".parquet")]
    lacking = [name for name in TOKENIZER if f"tokenizer/{name}" not in names]
    if lacking or len(shards) < 2:
        if request.check:
            return ShardsOutcome(msg=UNKNOWN_YET)
        said = f"holds {plural(len(shards), 'shard')} (*.parquet)"
        said += f", and its tokenizer lacks {' and '.join(lacking)}" if lacking else ""
        needed = f"at least two, the last of them for validation, and tokenizer/ with {' and '.join(TOKENIZER)}"
        raise ShardsError(f"{request.path} {said}; a data set has {needed} (python -m scripts.tok_train makes them)")
    made = Manifest(os.path.basename(request.path), [digests.described(path) for path in names])
    if not request.check:
        digests.save()
        save_manifest(request.path, made)
    return ShardsOutcome(True, made, after=made.listing())


def serve(request: ShardsRequest) -> ShardsOutcome:
    """Serve the folder's files to the peers, also those that are still to come."""
    options, ports = request.options, request.options["ports"] or {"low": 0, "high": 0}
    settings = server.ServerSettings(
        request.path,
        request.manifest() or Manifest("", []),
        options["address"],
        ports["low"],
        ports["high"],
        sorted(options["allow"]),
        options["secret"],
    )
    state = server.running(settings.place)
    same = state is not None and state.get("settings") == digest_of(settings)
    outcome = ShardsOutcome(changed=not same, before=_server_line(state))
    outcome.after = outcome.before if same else f"serving {request.path} on {settings.address}\n"
    # It offers only what has been read.
    digests = Digests(request.path)
    outcome.moved = [entry.path for entry, seen in compare(settings.manifest.files, digests).items() if seen != "ok"]
    if not same and not request.check:
        make_folder(request.path)
        server.stop(settings.place)
        with writing(request.path):
            digests.save()
        state = server.start(settings)
    port = state["port"] if state and (same or not request.check) else None
    outcome.more = {"server": {"host": request.host, "address": settings.address, "port": port}}
    return outcome


def stop(request: ShardsRequest) -> ShardsOutcome:
    """Stop the transfer's server and forget its secret; without a secret, those of all transfers."""
    secret = request.options["secret"]
    places = [server.place_of(request.path, secret)] if secret else server.places(request.path)
    outcome = ShardsOutcome(before="".join(_server_line(server.running(place)) for place in places))
    outcome.changed = outcome.before != ""
    for place in [] if request.check else places:
        server.stop(place)
    return outcome


def _server_line(state: Document | None) -> str:
    return f"serving on {state['address']}:{state['port']}, pid {state['pid']}\n" if state else ""


def sync(request: ShardsRequest) -> ShardsOutcome:
    """Complete the folder with every file of the manifest, from any peer."""
    manifest = request.manifest()
    if manifest is None:
        return ShardsOutcome(msg=UNKNOWN_YET)
    kept, digests = load_manifest(request.path), Digests(request.path)
    states = compare(manifest.files, digests)
    lacking = [entry for entry, state in states.items() if state != "ok"]
    outcome = ShardsOutcome(bool(lacking) or kept != manifest, manifest, after=manifest.listing())
    outcome.moved = [entry.path for entry in lacking]
    outcome.bytes = sum(entry.bytes for entry in lacking)
    outcome.repaired = {entry.path: states[entry] for entry in lacking if states[entry] != "missing"}
    there = [(entry, state) for entry, state in states.items() if state != "missing"]
    outcome.before = "".join(entry.line() if state == "ok" else f"{entry.path} {state}\n" for entry, state in there)
    if lacking:
        outcome.msg = f"{plural(len(lacking), 'file')}, {outcome.bytes} bytes to copy here"
    if not request.check:
        make_folder(request.path)
        with writing(request.path):
            _bring(request, outcome, lacking, digests)
            digests.save()
            save_manifest(request.path, manifest)
            sweep_parts(request.path)
    return outcome


def _bring(request: ShardsRequest, outcome: ShardsOutcome, lacking: list[ManifestEntry], digests: Digests) -> None:
    """First other folders of this host, then a check of the disk, then the network."""
    options = request.options
    wanted = [entry for entry in lacking if not any(take_seed(entry, seed, digests) for seed in options["seeds"])]
    outcome.bytes = sum(one.bytes for one in wanted)
    if len(wanted) < len(lacking):
        outcome.sources[request.host] = sum(one.bytes for one in lacking) - outcome.bytes
    if not wanted:
        return
    make_folder(request.path, outcome.bytes - part_bytes(request.path, wanted))
    before, behind = (
        [Source(peer, options["secret"] or "", options["address"] or "") for peer in peers]
        for peers in around(request.host, options["peers"])
    )
    received = Chain(digests, before, behind).pull(wanted)
    for host, count in received.items():
        outcome.sources[host] = outcome.sources.get(host, 0) + count


def around(host: str, chain: list[dict[str, Any]]) -> tuple[list[ShardPeer], list[ShardPeer]]:
    """The hosts before this one in the chain, the nearest first, and those behind it."""
    peers = [ShardPeer(str(one["host"]), validate.address(one["address"]), validate.port(one["port"])) for one in chain]
    own = next((number for number, peer in enumerate(peers) if peer.host == host), len(peers))
    return peers[:own][::-1], peers[own + 1 :]


def link_run(request: ShardsRequest) -> ShardsOutcome:
    """Link exactly the manifest's files into the run's data and tokenizer folders, after verifying each digest."""
    manifest, run_dir = request.manifest(), str(request.options["dest"])
    if manifest is None:
        return ShardsOutcome(msg=UNKNOWN_YET)
    if not request.check:
        digests = Digests(request.path)
        states = compare(manifest.files, digests)
        digests.save()
        if wrong := [f"{entry.path} {state}" for entry, state in states.items() if state != "ok"]:
            raise ShardsError(
                f"{plural(len(wrong), 'file')} of {request.path} do not match the manifest ({', '.join(wrong[:3])}); "
                "sync the data set first (--tags data)"
            )
    wanted = {run_path(one.path): os.path.join(request.path, one.path) for one in manifest.files}
    there = [f"{part}/{name}" for part in ("data", "tokenizer") for name in names_in(os.path.join(run_dir, part))]
    outcome = _link(request, run_dir, wanted, there)
    outcome.manifest = manifest
    return outcome


State = Callable[[ShardsRequest], ShardsOutcome]
STATES: dict[str, State] = {
    "imported": import_folder,
    "described": describe,
    "served": serve,
    "synced": sync,
    "stopped": stop,
    "linked": link_run,
}


def shard_sync(
    host: str, check: bool = False, states: Mapping[str, State] | None = None, **given: Any
) -> dict[str, object]:
    """Bring a folder into its state, or predict that, and return the result of the module with these options.

    states: the function of each state; the module has one more, which downloads.
    """
    options = {**{name: option.get("default") for name, option in OPTIONS.items()}, **given}
    path = str(options["path"])
    try:
        return (states or STATES)[options["state"]](ShardsRequest(host, path, check, options)).as_result()
    except (Busy, ShardsError, ValueError, OverflowError) as why:
        return {"failed": True, "msg": f"{host}: {why}"}
    except OSError as why:
        return {"failed": True, "msg": f"{host}: {why.filename or path}: {why.strerror or why}"}
