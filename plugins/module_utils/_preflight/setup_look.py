# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks in one go everything that the steps trainer and data copy to a host, by their own rules. Read-only.

Unreadable items count as missing; the step itself then reports the problem.
"""

from __future__ import annotations

import sys
from typing import Any, Mapping

from .._contract.document import Document
from .._kit import bare
from .._shards.folder import Digests, compare, links_of_run, load_manifest
from .._trainer import files as trainer_files
from .._trainer.uv_errors import VenvError, VenvSpec
from .._trainer.venv import Venv

OPTIONS: dict[str, dict[str, object]] = {
    "src": {"type": "path", "required": True},
    "dest": {"type": "path", "required": True},
    "files": {"type": "dict", "default": {}},
    "venv_dir": {"type": "path", "required": True},
    "host": {"type": "str"},
    "packages": {"type": "list", "elements": "str", "default": ["trainer"]},
    "python": {"type": "str"},
    "torch_index": {"type": "str", "default": "auto"},
    "digest": {"type": "str", "default": ""},
    "pins": {"type": "dict", "default": {}},
    "data_dir": {"type": "path", "required": True},
    "run_dir": {"type": "path", "required": True},
}


def say(mark: str, params: Mapping[str, Any]) -> None:
    """The program: returns the result of setup_info."""
    given = bare.expanded(params, [name for name, option in OPTIONS.items() if option["type"] == "path"])
    bare.answer(mark, setup_seen(given))


def setup_seen(given: Mapping[str, Any]) -> dict[str, Document]:
    """The parts that a host already has."""
    python = given["python"] or sys.executable
    wanted = VenvSpec(given["host"] or "", given["venv_dir"].rstrip("/"), python, given["digest"], given["pins"])
    return {
        "files": files_seen(given["dest"], given["files"]),
        "venv": venv_seen(wanted),
        "data": data_seen(given["data_dir"], given["run_dir"]),
    }


def files_seen(folder: str, wanted: Mapping[str, str]) -> Document:
    """Whether the folder contains exactly our files."""
    plain = bool(wanted) and all(trainer_files.is_inside(path) for path in wanted)
    difference = trainer_files.compare(folder, wanted)
    ready = plain and not difference.write and not difference.remove
    return {"ready": ready, "digest": trainer_files.digest_of(wanted)}


def venv_seen(wanted: VenvSpec) -> Document:
    """Whether the environment has the lock's packages and Python; only `ready` if it is incomplete."""
    try:
        venv = Venv(wanted)
        state, found = venv.look()
    except VenvError:
        return {"ready": False}
    if found is None or state != "ready":
        return {"ready": False}
    packages = found["packages"]
    return {
        "ready": True,
        "venv": wanted.path,
        "python_version": venv.minor,
        "torch": packages.get("torch"),
        "packages": packages,
    }


def data_seen(folder: str, run_dir: str) -> Document:
    """Whether the data set matches its manifest, and the run links exactly its files."""
    manifest = load_manifest(folder)
    if manifest is None:
        return {"ready": False, "digest": ""}
    try:
        states = compare(manifest.files, Digests(folder))
        links = links_of_run(folder, run_dir, manifest.files)
    except OSError:
        return {"ready": False, "digest": ""}
    ready = set(states.values()) <= {"ok"} and not links.make and not links.remove
    return {"ready": ready, "digest": manifest.digest()}
