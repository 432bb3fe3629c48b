# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings an env file into its state, for the module env_file and for the agent."""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, Mapping, Optional, Set, Tuple

from . import env_file as env_files

# Parameters of env_file.
OPTIONS: Dict[str, Dict[str, object]] = {
    "path": {"type": "path", "required": True},
    "env": {"type": "dict", "no_log": True},
    "secrets": {"type": "list", "elements": "str", "default": [], "no_log": False},
    "mode": {"type": "str", "default": "0600"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
NEEDED = [("state", "present", ["env"])]
ERRORS = (env_files.EnvFileError, OSError)


def octal(mode: str) -> int:
    """The mode as a number."""
    if not mode or len(mode) > 4 or set(mode) - set("01234567"):
        raise env_files.EnvFileError(f"mode {mode!r} is not a quoted octal mode such as '0600'")
    return int(mode, 8)


def mode_of(path: str) -> Optional[str]:
    """The file's mode as octal digits, None if it does not exist."""
    try:
        return f"{stat.S_IMODE(os.stat(path).st_mode):04o}"
    except OSError:
        return None


def apply(params: Mapping[str, Any], check: bool) -> Dict[str, object]:
    """Bring the file into its state, or predict that, and return the result."""
    path, present = params["path"], params["state"] == "present"
    env = env_files.checked(params["env"]) if present else {}
    mode = octal(params["mode"])
    if present and mode & 0o007 and set(params["secrets"]) & set(env):
        raise env_files.EnvFileError(f"{path} would hold secrets, so mode {params['mode']} must not give others access")
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a pipe or a device"
        raise env_files.EnvFileError(f"cannot write {path}: it is {what}")
    before, mode_before = env_files.read(path), mode_of(path)
    after = env_files.render(env) if present else None
    changed = before != after or (present and mode_before != f"{mode:04o}")
    if changed and not check:
        if after is None:
            os.unlink(path)
        else:
            env_files.store(path, after, mode)
    return {
        "changed": changed,
        "path": path,
        "names": sorted(env),
        "mode": f"{mode:04o}",
        "diff": difference(path, before, after, set(env) - set(params["secrets"]), (mode_before, f"{mode:04o}")),
    }


def difference(
    path: str, before: Optional[bytes], after: Optional[bytes], visible: Set[str], modes: Tuple[Optional[str], str]
) -> Dict[str, str]:
    """Both states of the file as texts without secrets."""
    old = env_files.parse(before) if before is not None else {}
    new = env_files.parse(after) if after is not None else {}
    texts = [
        "" if before is None else f"# mode {modes[0]}\n" + env_files.shown(old, visible),
        "" if after is None else f"# mode {modes[1]}\n" + env_files.shown(new, visible, other=old),
    ]
    return {"before": texts[0], "after": texts[1], "before_header": path, "after_header": path}


def env_file(check: bool = False, **given: Any) -> Dict[str, object]:
    """The result of the module env_file with these options."""
    return apply({**{name: option.get("default") for name, option in OPTIONS.items()}, **given}, check)
