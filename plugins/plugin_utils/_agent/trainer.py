# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side of setting up a trainer: it reads the sources and locks, and brings files, uv and wheels."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError

from ...module_utils._kit.files import locked
from ...module_utils._shards.folder import Manifest, described
from ...module_utils._trainer import files
from ...module_utils._trainer.venv import uv_beside
from .._wheels import TRAINER, Lock, bring_uv, bring_wheels, cache_folder, read_lock
from .carrier import Call


def sources(src: str) -> dict[str, bytes]:
    """Every file of a folder on the controller."""
    folder = Path(src).expanduser()
    if not folder.is_dir():
        raise AnsibleActionFail(f"the sources of the trainer are not on the controller: {folder} is not a folder")
    try:
        tree = files.read_tree(str(folder))
    except files.TreeError as why:
        raise AnsibleActionFail(str(why)) from why
    if "scripts/base_train.py" not in tree:
        raise AnsibleActionFail(f"{folder} on the controller is no trainer: it has no scripts/base_train.py")
    return tree


def lock_of(params: Mapping[str, Any]) -> Lock:
    """The lock of the packages."""
    folder = Path(params.get("src") or TRAINER).expanduser()
    return read_lock(folder, params["packages"], params.get("torch_index", "auto"))


def with_lock(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the verb on the host."""
    lock = lock_of(params)
    given = {name: value for name, value in params.items() if name not in ("src", "packages", "torch_index")}
    return {**given, "lock": lock.text, "digest": lock.digest, "pins": lock.pins}


def check_trainer(call: Call, trees: Mapping[str, str], venv: Mapping[str, Any]) -> dict[str, Any]:
    """Tell whether files (trees: as for trainer_files) and environment (venv: as for trainer_venv) are all there (`ready`); refuse to
    change what a training uses."""
    ready = True
    for dest, src in trees.items():
        asked = call.ask("trainer_files", dest=dest, files=files.digests_of(sources(src)))
        if asked.get("failed"):
            return asked
        ready = ready and not asked["changed"]
    asked = call.ask("trainer_venv", **{**with_lock(venv), "check": True})
    return asked if asked.get("failed") else {"ready": ready and not asked["changed"]}


def trainer_files(call: Call, trees: Mapping[str, str]) -> dict[str, Any]:
    """Bring folders on the host to the files of others on the controller (trees); the digest is that of the first."""
    found = [brought(call, dest, sources(src)) for dest, src in trees.items()]
    failed = [one for one in found if one.get("failed")]
    diff = [one["diff"] for one in found if "diff" in one]
    return failed[0] if failed else {**found[0], "changed": any(one["changed"] for one in found), "diff": diff}


def brought(call: Call, dest: str, tree: Mapping[str, bytes]) -> dict[str, Any]:
    """One of them: two round trips if something differs, otherwise one."""
    digests = files.digests_of(tree)
    asked = call.ask("trainer_files", dest=dest, files=digests)
    if not asked.get("changed") or asked.get("failed") or call.check:
        return asked
    contents = {path: base64.b64encode(tree[path]).decode() for path in asked["written"]}
    return call.ask("trainer_files", dest=dest, files=digests, contents=contents)


def trainer_venv(call: Call, **params: Any) -> dict[str, Any]:
    """Make an environment, see the verb on the host; packages, torch_index and src (a trainer's folder) select its lock.

    Two round trips if uv must be brought, otherwise one.
    """
    given = with_lock(params)
    asked = call.ask("trainer_venv", **given)
    if not asked.get("lacks_uv") or asked.get("failed"):
        return asked
    try:
        bring_uv_beside(call, str(asked["lacks_uv"]), str(asked["venv"]))
    except AnsibleError as why:
        return {"failed": True, "reason": "network", "tags": asked.get("tags"), "msg": f"{call.host}: {why.message}"}
    return call.ask("trainer_venv", **given)


def bring_uv_beside(call: Call, machine: str, venv: str) -> None:
    """Copy uv to the host, beside the environment; renamed, so that no half copy is ever run."""
    action = call.action
    program, there = bring_uv(cache_folder(), machine), uv_beside(venv)
    part = f"{there}.{os.getpid()}"
    action._transfer_file(str(program), part)
    action._fixup_perms2([part], execute=True)
    action._low_level_execute_command(
        f"mv {action._connection._shell.quote(part)} {action._connection._shell.quote(there)}"
    )


def trainer_wheels(call: Call, dest: str, python: str, machine: str, **lock: Any) -> dict[str, Any]:
    """Fetch the wheels of a lock for a python and a machine to dest on the controller, for hosts that reach no package index.

    lock: as for trainer_venv. The answer has their manifest.
    """
    if call.check:
        return {"changed": True}
    folder = Path(dest)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(str(folder) + ".lock", 1800):
        changed = bring_wheels(lock_of(lock).text, python, machine, folder)
        manifest = Manifest(folder.name, [described(str(path)) for path in sorted(folder.iterdir())])
    return {"changed": changed, "manifest": manifest.document()}
