# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Environment files that a POSIX shell reads byte for byte, and the state of one, for the module env_file and the agent."""

from __future__ import annotations

import os
import re
import stat
from typing import Any, Dict, Iterable, Mapping

from .files import write_whole

HEADER = b"# Written by nanochat.ddp.env_file. Read it with: set -a; . ./env; set +a\n"
MASK = "********"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# One assignment as render() writes it: quoted strings, with \' for a quote between them.
_ASSIGNMENT = re.compile(rb"([A-Za-z_][A-Za-z0-9_]*)=('[^']*'(?:\\''[^']*')*)\n")
# The kernel refuses to start a program with a longer NAME=value (MAX_ARG_STRLEN, counted with the final NUL).
_LONGEST = 131072 - 1

# Parameters of env_file.
OPTIONS: Dict[str, Dict[str, object]] = {
    "path": {"type": "path", "required": True},
    "env": {"type": "dict", "no_log": True},
    "secrets": {"type": "list", "elements": "str", "default": [], "no_log": False},
    "mode": {"type": "str", "default": "0600"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
}
NEEDED = [("state", "present", ["env"])]

# Variables that shells reserve: dash or bash rejects, ignores or changes an assignment, so the value
# would be lost.
SHELL_OWNED = frozenset(
    (
        *("_", "PWD", "OLDPWD", "PPID", "UID", "EUID", "OPTIND", "LINENO", "SHLVL", "SHELLOPTS", "BASHOPTS", "BASHPID"),
        *("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "HISTCMD", "FUNCNAME", "GROUPS"),
        *("DIRSTACK", "PIPESTATUS", "COMP_WORDBREAKS", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0"),
        *("BASH_CMDS", "BASH_COMMAND", "BASH_LINENO", "BASH_REMATCH", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO"),
    )
)


class EnvFileError(Exception):
    """Why an environment cannot be written, in one sentence."""


ERRORS = (EnvFileError, OSError, ValueError)


def checked(env: Mapping[Any, Any]) -> dict[str, str]:
    """The environment as names and texts; EnvFileError for the first invalid entry. Numbers are converted; any other type is ambiguous."""
    texts = {}
    for name, value in env.items():
        if not isinstance(name, str) or not _NAME.match(name):
            raise EnvFileError(
                f"{name!r} is not a valid environment variable name: use letters, digits and _, not starting with a digit"
            )
        if name in SHELL_OWNED:
            raise EnvFileError(f"{name} cannot be set: the shell that reads the file reserves this variable")
        if isinstance(value, (bool, dict, list)) or value is None:
            raise EnvFileError(
                f"the value of {name} is {type(value).__name__}, not text: quote it exactly as the process should see it"
            )
        text = value if isinstance(value, str) else str(value)
        if "\0" in text:
            raise EnvFileError(f"the value of {name} contains a NUL byte, which environments cannot contain")
        try:
            length = len(os.fsencode(f"{name}={text}"))
        except UnicodeEncodeError as error:
            raise EnvFileError(f"the value of {name} contains a lone surrogate") from error
        if length > _LONGEST:
            raise EnvFileError(f"{name} is {length} bytes long with its value; Linux allows at most {_LONGEST}")
        texts[name] = text
    return texts


def render(env: Mapping[str, str]) -> bytes:
    """The file for an environment: one assignment per name, sorted by name."""
    lines = [os.fsencode(f"{name}={quoted(env[name])}\n") for name in sorted(env)]
    return HEADER + b"".join(lines)


def quoted(text: str) -> str:
    """A word quoted for a POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def parse(data: bytes) -> dict[str, str] | None:
    """Parse the output of render(); None for any other text, which only a shell could interpret."""
    env = {}
    at = len(HEADER) if data.startswith(HEADER) else 0
    while at < len(data):
        found = _ASSIGNMENT.match(data, at)
        if not found:
            return None
        value = found.group(2)[1:-1].replace(b"'\\''", b"'")
        env[os.fsdecode(found.group(1))] = os.fsdecode(value)
        at = found.end()
    return env


def shown(env: Mapping[str, str] | None, visible: Iterable[str], other: Mapping[str, str] | None = None) -> str:
    """An environment for display: values only of `visible` names; a masked value that differs from `other` is marked."""
    if env is None:
        return "(a file not written by nanochat.ddp.env_file)\n"
    names = set(visible)
    lines = []
    for name in sorted(env):
        if name in names:
            lines.append(f"{name}={quoted(env[name])}\n")
        else:
            changed = other is not None and name in other and other[name] != env[name]
            lines.append(f"{name}={MASK}{' (changed)' if changed else ''}\n")
    return os.fsencode("".join(lines)).decode("utf-8", "backslashreplace")


def read(path: str) -> bytes | None:
    """The file's content, None if it does not exist."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvFileError(f"cannot read {path}: {error.strerror}") from error


def env_file(check: bool = False, **given: Any) -> Dict[str, object]:
    """Bring the file into its state, or predict that, and return the result of the module with these options."""
    params: Dict[str, Any] = {**{name: option.get("default") for name, option in OPTIONS.items()}, **given}
    path, present = params["path"], params["state"] == "present"
    env = checked(params["env"]) if present else {}
    if not re.fullmatch("[0-7]{1,4}", params["mode"]):
        raise EnvFileError(f"mode {params['mode']!r} is not a quoted octal mode such as '0600'")
    mode = int(params["mode"], 8)
    if present and mode & 0o007 and set(params["secrets"]) & set(env):
        raise EnvFileError(f"{path} would hold secrets, so mode {params['mode']} must not give others access")
    if os.path.exists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a pipe or a device"
        raise EnvFileError(f"cannot write {path}: it is {what}")
    before, after = read(path), render(env) if present else None
    mode_before = stat.S_IMODE(os.stat(path).st_mode) if before is not None else None
    changed = before != after or (present and mode_before != mode)
    if changed and not check:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise EnvFileError(f"cannot write {path}: the folder {folder} does not exist; create it first")
        try:
            if after is None:
                os.unlink(path)
            else:
                # AnsibleModule.atomic_move would give the file the umask's mode for a moment.
                write_whole(path, after, mode, durable=True)
        except OSError as error:
            raise EnvFileError(f"cannot write {path}: {error.strerror}") from error
    # Both states as texts without secrets.
    old, visible = parse(before or b""), set(env) - set(params["secrets"])
    diff = {
        "before": "" if before is None else f"# mode {mode_before:04o}\n" + shown(old, visible),
        "after": f"# mode {mode:04o}\n" + shown(env, visible, other=old) if present else "",
        "before_header": path,
        "after_header": path,
    }
    return {"changed": changed, "diff": diff}
