# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the virtual environment of a trainer about, or removes it, and tells what it holds."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from .._contract.document import section
from .._contract.urls import NO_CREDENTIALS, has_credentials
from .uv_errors import VenvError, VenvSpec
from .venv import Venv, building, uv_beside

LOCK_SECONDS = 1800  # how long another build of the same environment is waited for


def trainer_venv(
    path: str, host: str, state: str = "present", wheels_dir: str = "", check: bool = False, **wanted: Any
) -> dict[str, object]:
    """Make the environment of a lock with uv unless it is there, remove it (state: `absent`), or tell what that would change.

    wanted: the further fields of VenvSpec. Where the host has no uv, `lacks_uv` is its architecture. A failure has its reason in one word,
    for choosing another way (`network` if no package index answers).
    """
    path = path.rstrip("/")
    found = [one for one in (uv_beside(path), shutil.which("uv")) if one and os.access(one, os.X_OK)]
    python = wanted.pop("python", None) or sys.executable
    spec = VenvSpec(host, path, uv=found[0] if found else "", python=python, wheels=wheels_dir, **wanted)
    venv, tags = Venv(spec), None
    make = absent if state == "absent" else present
    try:
        if has_credentials(spec.torch_index):
            raise VenvError(f"{host}: torch_index is {NO_CREDENTIALS}", "requirement")
        # An environment is removed also where no Python could make one.
        tags = venv.tags if make is present else None
        # Somebody else's environment is only read, and its folder may not be writable for a lock.
        if check or venv.place() == "foreign":
            result = make(venv, check)
        else:
            with building(path, host, LOCK_SECONDS):
                result = make(venv, check)
    except VenvError as why:
        return {"failed": True, "msg": str(why), "reason": why.reason, "tags": tags}
    except OSError as why:
        message = f"{host}: {why.filename or path}: {why.strerror or why}"
        return {"failed": True, "msg": message, "reason": "folder", "tags": tags}
    version = tags["python"] if tags else None
    return {"venv": path, "python": venv.python, "python_version": version, "tags": tags, **result}


def present(venv: Venv, check: bool) -> dict[str, object]:
    """Makes the environment unless it is there."""
    before = section(venv.stamp(), "packages")
    state, found = venv.look()
    changes, lacks_uv = state != "ready", ""
    if changes and not check:
        if venv.wanted.uv:
            venv.build(state)
            found = venv.packages()
        else:
            changes, lacks_uv = False, os.uname().machine
    packages = found["packages"] if found else {}
    after = packages or {name: versions[-1] for name, versions in venv.wanted.pins.items()}
    return {
        "changed": changes,
        "lacks_uv": lacks_uv,
        "packages": packages,
        "torch": packages.get("torch"),
        "torch_is_cpu_build": found["cuda"] is None if found and packages.get("torch") else None,
        "index": venv.index or venv.stamp().get("index"),
        "warnings": venv.warnings,
        "diff": {"before": listed(before), "after": listed(after)},
    }


def absent(venv: Venv, check: bool) -> dict[str, object]:
    """Removes the environment, and nothing that only has its path."""
    state = venv.place()
    if state in ("occupied", "foreign"):
        raise VenvError(
            f"{venv.wanted.host}: {venv.wanted.path} was not created by this collection, so it was not changed",
            "occupied",
        )
    before = section(venv.stamp(), "packages")
    if not check:
        venv.remove()
    return {"changed": state != "absent", "packages": {}, "diff": {"before": listed(before), "after": ""}}


def listed(packages: Mapping[str, object]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
