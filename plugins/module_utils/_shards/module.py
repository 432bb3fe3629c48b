# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shared code of the shard modules: options, the checked request, and the result."""

from __future__ import annotations

import platform
import time
from typing import Any, Callable, Mapping, NamedTuple

from .._contract import validate
from .._contract.manifest import Manifest
from .._kit.arguments import checked_module
from .folder import ShardsError, digest_of

# The options of the documentation fragments shards and shards.verify.
PATH: dict[str, dict[str, object]] = {"path": {"type": "path", "required": True}, "host": {"type": "str"}}
VERIFY: dict[str, dict[str, object]] = {"verify": {"type": "str", "default": "changed", "choices": ["changed", "full"]}}


class ShardsRequest(NamedTuple):
    """The module's validated options."""

    host: str
    path: str
    check: bool
    id: str
    layout: str
    full: bool  # read every byte, ignoring stored digests
    manifest: Manifest | None
    options: Mapping[str, Any]


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


def run_module(
    make: Callable[[ShardsRequest], ShardsOutcome], argument_spec: Mapping[str, object], **checks: Any
) -> None:
    """Run a module; file system errors become one sentence."""
    module = checked_module(argument_spec=argument_spec, supports_check_mode=True, **checks)
    given = module.params
    request = ShardsRequest(
        host=given["host"] or platform.node(),
        path=given["path"],
        check=module.check_mode,
        id=given.get("id") or "",
        layout=given.get("layout", "data"),
        full=given.get("verify") == "full",
        manifest=given.get("manifest"),
        options=given,
    )
    began = time.monotonic()
    try:
        outcome = make(request)
        module.exit_json(**outcome.as_result(time.monotonic() - began))
    except ShardsError as why:
        module.fail_json(msg=str(why))
    except validate.InvalidHostData as why:
        module.fail_json(msg=f"{request.host}: {why}")
    except OSError as why:
        module.fail_json(msg=f"{request.host}: {why.filename or request.path}: {why.strerror or why}")
