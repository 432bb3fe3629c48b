# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documents that judgements keep on the controller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError

from ...module_utils._kit.files import write_whole


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
