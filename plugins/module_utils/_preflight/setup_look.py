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
from .._shards.folder import Digests, compare, links_of_run, load_manifest
from .._trainer import files as trainer_files
from .._trainer.uv_errors import VenvError
from .._trainer.venv import Venv


def setup_info(
    dest: str,
    files: Mapping[str, str],
    venv_dir: str,
    digest: str,
    pins: Mapping[str, Any],
    data_dir: str,
    run_dir: str,
    python: str = "",
    host: str = "",
) -> dict[str, Document]:
    """The parts that a host already has: the trainer's files below dest, the environment of a lock (its digest and pins), and the data."""
    venv = Venv(host, venv_dir.rstrip("/"), python or sys.executable, digest, pins)
    return {"files": files_seen(dest, files), "venv": venv_seen(venv), "data": data_seen(data_dir, run_dir)}


def files_seen(folder: str, wanted: Mapping[str, str]) -> Document:
    """Whether the folder contains exactly our files."""
    plain = bool(wanted) and all(trainer_files.is_inside(path) for path in wanted)
    difference = trainer_files.compare(folder, wanted)
    ready = plain and not difference.write and not difference.remove
    return {"ready": ready, "digest": trainer_files.digest_of(wanted)}


def venv_seen(venv: Venv) -> Document:
    """Whether the environment has the lock's packages and Python; only `ready` if it is incomplete."""
    try:
        if not venv.is_ready():
            return {"ready": False}
    except (VenvError, OSError):
        return {"ready": False}
    packages = venv.packages()
    return {
        "ready": True,
        "venv": venv.path,
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
