# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks wheels that a host fetched for others against the digests in the package indexes."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Iterator, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import told
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import Run
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import (
    CPU_INDEX,
    name_of,
    page_of,
    pip_settings,
)

DEFAULT_INDEX = "https://pypi.org/simple"
LISTED = re.compile(r"""sha256["']?\s*[=:]\s*["']?([0-9a-f]{64})""")


def unconfirmed(files: Sequence[Mapping[str, Any]], torch_index: str, run: Run, pip: Sequence[str]) -> list[str]:
    """Names of the files ({name, sha256}) that no index lists, or for which none can be asked here."""
    settings = pip_settings(run, pip)
    listed: dict[str, set[str]] = {}
    wrong = []
    for one in files:
        name, sha256 = told.file_path(one.get("name")), told.sha256(one.get("sha256"))
        project = name_of(name.partition("-")[0])
        if project not in listed:
            listed[project] = set(_digests(project, places(torch_index, settings), settings))
        if sha256 not in listed[project]:
            wrong.append(name)
    return sorted(wrong)


def places(torch_index: str, settings: Mapping[str, str]) -> list[str]:
    """Where pip would look here: indexes and folders of wheels."""
    words = " ".join(settings.get(name, "") for name in ("find-links", "extra-index-url"))
    found = [f"file://{word}" if word.startswith("/") else word for word in words.replace("\\n", " ").split()]
    if settings.get("no-index", "0").lower() in ("0", "false", "no", "off", ""):
        torch = {"auto": CPU_INDEX, "default": ""}.get(torch_index, torch_index)
        found += [settings.get("index-url", DEFAULT_INDEX), *([torch] if torch else [])]
    return found


def _digests(project: str, urls: Sequence[str], settings: Mapping[str, str]) -> Iterator[str]:
    """Digests of all files of a project in the indexes and folders."""
    for url in urls:
        yield from LISTED.findall(page_of(url, project, settings) or "")
        folder = url[len("file://") :] if url.startswith("file:///") else ""
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith(".whl") and name_of(name.partition("-")[0]) == project:
                with open(os.path.join(folder, name), "rb") as file:
                    yield hashlib.sha256(file.read()).hexdigest()
