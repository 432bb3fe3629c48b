# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parts of a plan, a session or an event as they were read from a file, which may hold anything: torn, edited, or of another version."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional

# A JSON object of which nothing is known yet; each of its values is looked at before it is used.
Document = Dict[str, object]


def section(document: Any, name: str) -> Document:
    """A dictionary within a document; empty where there is none."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def items(document: Any, name: str) -> List[Document]:
    """The dictionaries of a list within a document."""
    found = document.get(name) if isinstance(document, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def words(document: Any, name: str) -> List[str]:
    """The texts of a list within a document."""
    found = document.get(name) if isinstance(document, dict) else None
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def text(document: Any, name: str) -> Optional[str]:
    """A text within a document; None where there is none."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def whole(document: Any, name: str) -> Optional[int]:
    """A whole number within a document; None where there is none, or none that a machine can hold."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and abs(found) < 2**63 else None


def number(document: Any, name: str) -> int:
    """The same, 0 where there is none."""
    return whole(document, name) or 0


def digest_of(document: Any) -> str:
    """A short name for what a document holds."""
    import hashlib  # which takes a tenth of the time of a bare look, and most looks need none

    plain = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def signed(document: Document) -> Document:
    """The same with the digest of all the rest."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return {**rest, "digest": digest_of(rest)}


def undamaged(document: Document) -> Document:
    """A signed document; empty where the digest does not fit, so where it is not what was written."""
    return document if len(document) > 1 and document.get("digest") == signed(document)["digest"] else {}
