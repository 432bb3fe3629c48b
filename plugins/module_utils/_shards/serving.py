# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start and stop the server of a folder."""

from __future__ import annotations

from ansible_collections.nanochat.ddp.plugins.module_utils._shards import share
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.folder import (
    Digests,
    compare,
    entries,
    load_manifest,
    make_folder,
    writing,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._shards.module import ShardsOutcome, ShardsRequest


def serve_or_stop(request: ShardsRequest) -> ShardsOutcome:
    """Start or stop the server, according to the option state."""
    return stop(request) if request.options["state"] == "stopped" else serve(request)


def serve(request: ShardsRequest) -> ShardsOutcome:
    """Serve the folder's verified files."""
    outcome = ShardsOutcome()
    options = request.options
    ports = options["ports"] or {"low": 0, "high": 0}
    settings = share.ServerSettings(
        request.host,
        request.path,
        options["address"],
        ports["low"],
        ports["high"],
        sorted(options["allow"]),
        options["secret"],
        options["lifetime"],
        options["idle"],
    )
    place = share.place_of(request.path, settings.secret)
    state = share.running(place)
    same = state is not None and share.is_same(settings)
    outcome.changed = not same
    outcome.before = _server_line(state)
    outcome.after = _server_line(state) if same else f"serving {request.path} on {settings.address}\n"
    if not same and not request.check:
        make_folder(request.path, request.host)
        share.stop(place)
        _know_digests(request)
        state = share.start(settings)
    outcome.more = _server(settings.host, settings.address, state if not request.check or same else None)
    return outcome


def _know_digests(request: ShardsRequest) -> None:
    """Hash changed files, so that the server offers everything valid from the start."""
    wanted = entries(request.manifest or load_manifest(request.path) or {})
    with writing(request.path, request.host):
        digests = Digests(request.path, believe=not request.full)
        compare(wanted, digests)
        digests.save()


def _server(host: str, address: str | None, state: share.ServerState | None) -> dict[str, object]:
    """The server as its peers see it, with its process and what it has sent."""
    state = state or {}
    return {
        "server": {"host": host, "address": state.get("address") or address, "port": state.get("port")},
        "pid": state.get("pid"),
        "served": dict(state.get("served") or {}),
    }


def _server_line(state: share.ServerState | None) -> str:
    return f"serving on {state['address']}:{state['port']}, pid {state['pid']}\n" if state else ""


def stop(request: ShardsRequest) -> ShardsOutcome:
    """Stop the transfer's server and delete its secret; without a secret, those of all transfers."""
    outcome = ShardsOutcome()
    secret = request.options["secret"]
    state = None
    for place in [share.place_of(request.path, secret)] if secret else share.places(request.path):
        found = share.running(place)
        outcome.changed = outcome.changed or found is not None
        outcome.before += _server_line(found)
        state = found or state
        if not request.check:
            state = share.stop(place) or state
    outcome.more = _server(request.host, None, state)
    return outcome
