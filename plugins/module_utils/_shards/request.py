# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The validated options of the module shard_sync, and its result."""

from __future__ import annotations

from typing import Any, Collection, Mapping, NamedTuple

from .._contract.manifest import Manifest
from .folder import Digests, digest_of


class ShardsRequest(NamedTuple):
    """The module's validated options."""

    host: str
    path: str
    check: bool
    options: Mapping[str, Any]

    @property
    def layout(self) -> str:
        return str(self.options["layout"])

    @property
    def manifest(self) -> Manifest | None:
        found: Manifest | None = self.options["manifest"]
        return found

    def digests(self) -> Digests:
        """Those of the folder's files; with verify=full all of them are read."""
        return Digests(self.path, use_stored=self.options["verify"] != "full")


class ShardsOutcome:
    """The module's result, with the same keys whether or not something changed."""

    def __init__(self) -> None:
        self.changed = False
        self.manifest: Manifest | None = None
        self.moved: list[str] = []
        self.bytes = 0
        self.sources: dict[str, int] = {}
        self.repaired: dict[str, str] = {}
        self.extra: list[str] = []
        self.before = ""
        self.after = ""
        self.msg = ""
        self.more: dict[str, object] = {}

    def compare_names(self, wanted: Collection[str]) -> None:
        """The diff between the wanted names and those already there, which are all but the moved ones, and extra ones."""
        lacking = set(self.moved)  # a whole collection has thousands
        there = [*(name for name in wanted if name not in lacking), *self.extra]
        self.before = "".join(f"{name}\n" for name in sorted(there))
        self.after = "".join(f"{name}\n" for name in sorted(wanted))
        self.changed = bool(self.moved or self.extra)

    def as_result(self, seconds: float) -> dict[str, object]:
        return {
            "changed": self.changed,
            "manifest": self.manifest,
            "digest": digest_of(self.manifest) if self.manifest else None,
            "moved": self.moved,
            "bytes": self.bytes,
            "seconds": round(seconds, 3),
            "from": self.sources,
            "repaired": self.repaired,
            "extra": self.extra,
            "msg": self.msg,
            "diff": {"before": self.before, "after": self.after},
            **self.more,
        }
