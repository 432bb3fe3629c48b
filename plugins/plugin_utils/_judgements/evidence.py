# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shared by judgements: the evidence of all hosts, and documents that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError

from ...module_utils._kit.files import write_whole


def evidence_of(hosts: Iterable[str], evidence: Mapping[str, Any], *keys: str) -> dict[str, Mapping[str, Any]]:
    """The evidence of every host; missing evidence or a missing key is an error, never "nothing found"."""
    found: dict[str, Mapping[str, Any]] = {}
    for host in hosts:
        seen = evidence.get(host)
        lacking = [key for key in keys if not isinstance(seen, Mapping) or key not in seen]
        if not isinstance(seen, Mapping) or lacking:
            what = f" about {', '.join(lacking)}" if lacking else ", not even a failed one,"
            raise AnsibleError(
                f"There is no evidence{what} from {host}; run the play again without --limit and --start-at-task."
            )
        found[host] = dict(seen)
    return found


def keep(path: str | None, document: Any, what: str, mode: int = 0o644, check: bool = False) -> bool:
    """Save a document as JSON on the controller; whether that changed the file, or would without check mode."""
    if not path:
        return False
    file, content = Path(path).expanduser(), json.dumps(document, indent=2) + "\n"
    try:
        if file.exists() and file.read_bytes() == content.encode():
            return False
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(str(file), content, mode)
    except OSError as error:
        raise AnsibleError(f"{what} could not be written to {path} on the controller: {error.strerror}.") from None
    return True
