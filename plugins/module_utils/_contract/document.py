# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads parts of a plan, session or event from a file that may contain anything: torn, edited, or of another version."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional

# An unchecked JSON object; each value is checked before use.
Document = Dict[str, object]


def section(document: Any, name: str) -> Document:
    """A dictionary within a document; empty if missing."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, dict) else {}


def value_at(document: Any, *keys: str) -> Any:
    """The value below these keys, each within the section of the one before; None if one is missing."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def items(document: Any, name: str) -> List[Document]:
    """The dictionaries of a list within a document."""
    found = document.get(name) if isinstance(document, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def words(document: Any, name: str) -> List[str]:
    """The texts of a list within a document."""
    found = document.get(name) if isinstance(document, dict) else None
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def text(document: Any, name: str) -> Optional[str]:
    """A text within a document; None if missing."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def whole(document: Any, name: str) -> Optional[int]:
    """An integer within a document; None if missing or too large."""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and abs(found) < 2**63 else None


def number(document: Any, name: str) -> int:
    """The same, 0 if missing."""
    return whole(document, name) or 0


def digest_of(document: Any) -> str:
    """A short digest of a document's content."""
    import hashlib  # imported here, because it costs a tenth of a bare poll and most polls do not need it

    plain = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def signed(document: Document) -> Document:
    """The document with the digest of the rest."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return {**rest, "digest": digest_of(rest)}


def undamaged(document: Document) -> Document:
    """A signed document; empty if the digest does not match."""
    return document if len(document) > 1 and document.get("digest") == signed(document)["digest"] else {}
