# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side of setting up a trainer: it reads the sources and locks, and brings files, uv and wheels; and the server of a
tracker, which has an environment of its own."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from ansible.errors import AnsibleError

from ...module_utils._contract.decode import PlainName
from ...module_utils._contract.validate import InvalidHostData, plain_name
from ...module_utils._kit.files import locked
from ...module_utils._session.tracker import NAME as TRACKER
from ...module_utils._trainer import files
from ...module_utils._trainer.venv import uv_beside
from .._runs import command_on
from .._wheels import TRAINER, bring_uv, bring_wheels, cache_folder, read_lock
from .carrier import Call, decoded


def with_lock(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the verb on the host."""
    folder = Path(params.get("src") or TRAINER).expanduser()
    given = {name: value for name, value in params.items() if name not in ("src", "packages", "torch_index")}
    return {**given, **read_lock(folder, params["packages"], params.get("torch_index", "auto"))}


def check_trainer(call: Call, dest: str, src: str, venv: Mapping[str, object]) -> dict[str, Any]:
    """Tell whether files (as for trainer_files) and environment (venv: as for trainer_venv) are all there (`ready`); refuse to
    change what a training uses."""
    brought = call.ask("trainer_files", dest=dest, files=files.digests_of(files.read_tree(src)))
    if brought.get("failed"):
        return brought
    made = call.ask("trainer_venv", **{**with_lock(venv), "check": True})
    return made if made.get("failed") else {"ready": not brought["changed"] and not made["changed"]}


def trainer_files(call: Call, dest: str, src: str) -> dict[str, Any]:
    """Bring a folder on the host to the files of one on the controller: two round trips if something differs, otherwise one."""
    tree = files.read_tree(src)
    digests = files.digests_of(tree)
    asked = call.ask("trainer_files", dest=dest, files=digests)
    if not asked.get("changed") or asked.get("failed") or call.check:
        return asked
    contents = {path: base64.b64encode(tree[path]).decode() for path in asked["written"]}
    return call.ask("trainer_files", dest=dest, files=digests, contents=contents)


def trainer_venv(call: Call, **params: Any) -> dict[str, Any]:
    """Make an environment, see the verb on the host; packages, torch_index and src (a trainer's folder) select its lock.

    A host that reaches no package index, or has the wheels of an earlier lock, gets the packages from the controller, if a folder for them
    is given (wheels_dir).
    """
    given = with_lock(params)
    answer = made_with_uv(call, given)
    if given.get("wheels_dir") and answer.get("lacks_packages"):
        refused = bring_packages(call, given, answer.get("tags"))
        answer = refused or made_with_uv(call, {**given, "offline": True})
    return answer


def made_with_uv(call: Call, given: Mapping[str, Any]) -> dict[str, Any]:
    """The host's answer: two round trips if uv must be brought, otherwise one."""
    asked = decoded(call.ask("trainer_venv", **given), {"lacks_uv": Optional[PlainName]}, call.host)
    if not asked.get("lacks_uv") or asked.get("failed"):
        return asked
    there = uv_beside(given["path"])
    part = f"{there}.{os.getpid()}"
    try:
        call.action._transfer_file(str(bring_uv(cache_folder(), asked["lacks_uv"])), part)
        call.action._fixup_perms2([part], execute=True)
        # Renamed, so that no half copy is ever run.
        call.action._low_level_execute_command(shlex.join(["mv", part, there]))
    except AnsibleError as why:
        return {"failed": True, "msg": f"{call.host}: {why.message}"}
    made = call.ask("trainer_venv", **given)
    if not made.get("lacks_uv"):
        return made
    told = "cannot be run; is that on a file system without room, or mounted with noexec?"
    return {"failed": True, "msg": f"{call.host}: {there}, copied from the controller, {told}"}


def bring_packages(call: Call, given: Mapping[str, Any], tags: Any) -> dict[str, Any] | None:
    """Fetch the wheels of a lock, and copy to the host those that it lacks; the answer of a host that cannot take them."""
    try:
        python, machine, kind = (plain_name(tags[name]) for name in ("python", "machine", "kind"))
    except (InvalidHostData, LookupError, TypeError) as why:
        return {"failed": True, "msg": f"{call.host} sent an invalid answer about its Python: {why}"}
    folder = cache_folder() / "wheels" / kind
    folder.mkdir(parents=True, exist_ok=True)
    with locked(str(folder) + ".lock", 1800):
        wheels = bring_wheels(given["lock"], python, machine, folder)
    place = f"{given['wheels_dir']}/{kind}"
    asked = decoded(call.ask("lacking_wheels", path=place, wheels=wheels), {"lacking": list[str]}, call.host)
    if asked.get("failed"):
        return asked
    # No other file of the controller, whatever the host asks for.
    for name in wheels.keys() & asked["lacking"]:
        call.action._transfer_file(str(folder / name), f"{place}/{name}")
    return None


def start_tracker(call: Call) -> dict[str, Any]:
    """Start the server, with a Python environment of its own, unless it runs; `show` tells where it is."""
    plan, node = call.variable("ddp_plan"), call.variable("ddp_node")
    port, folder = plan["training"]["tracker_port"], tracker_folder(call)
    made = trainer_venv(
        call, path=f"{folder}/venv", packages=["mlflow-server"], python=node.get("python") or "", torch_index="default"
    )
    if made.get("failed"):
        return made
    names = list(dict.fromkeys(["localhost", "127.0.0.1", node["address"], plan["master"]["host"]]))
    started = call.ask("start_tracker", path=folder, venv_dir=f"{folder}/venv", port=port, names=names)
    known = call.variables["hostvars"][call.host]
    from_here = command_on(call.host, known, forwarding=["-N", "-L", f"{port}:127.0.0.1:{port}"])
    show = f"MLflow: http://127.0.0.1:{port} on {call.host}{f'; from here: {from_here}' if from_here else ''}"
    return {**started, "changed": made["changed"] or started["changed"], "show": "" if call.check else show}


def stop_tracker(call: Call) -> dict[str, Any]:
    """End the server on a host that has one; what it keeps stays."""
    return call.ask("tmux_session", name=TRACKER, state_dir=tracker_folder(call), state="absent", stop_timeout=3)


def tracker_folder(call: Call) -> str:
    """Everything of the server: its Python, database, artifacts and log."""
    return f"{call.which_run()['base_dir']}/tracker"
