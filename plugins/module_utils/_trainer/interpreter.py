# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses the Python for the trainer's environment, or says what to install."""

from __future__ import annotations

import json
import os
import re
from typing import Callable, NamedTuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import MAKE_PYTHON, PYTHONS
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_text

INTERPRETERS = (*("python%d.%d" % version for version in PYTHONS), "python3")

Run = Callable[..., "tuple[int, str, str]"]

# Runs on any Python 3, so that one that is too old can be reported with its version.
ASK_INTERPRETER = """
import importlib.util, json, os, platform, sys
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable, "machine": platform.machine(),
    "system": platform.system(), "venv": has("venv"), "ensurepip": has("ensurepip"), "pip": has("pip"), "libc": list(platform.libc_ver())}))
"""


class VenvError(Exception):
    """A sentence, and a code for the reason so that callers can try something else."""

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


class HostInterpreter(NamedTuple):
    """A Python of this host."""

    path: str
    version: tuple[int, int, int]
    machine: str
    has_venv: bool
    has_ensurepip: bool
    has_pip: bool
    libc: str
    system: str = "Linux"

    @property
    def minor(self) -> str:
        """For example 3.11, the part of the version that compiled packages depend on."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags that wheels must match."""
        kind = f"{self.minor}-{self.machine}"
        return {"python": self.minor, "machine": self.machine, "libc": self.libc, "kind": kind}


def find_interpreter(
    run: Run, find: Callable[[str], str | None], wanted: str, minimum: str, host: str
) -> HostInterpreter:
    """The given Python, or the first suitable one of this host."""
    seen = []
    for name in [wanted] if wanted else INTERPRETERS:
        path = name if os.path.isabs(name) else find(name)
        found = ask_interpreter(run, path) if path else None
        if found is None:
            if wanted:
                seen.append(f"{wanted} does not exist or does not run")
            continue
        if found.version[:2] >= version_numbers(minimum):
            return found
        seen.append(f"{name} is {'.'.join(map(str, found.version))}")
    what = "; ".join(dict.fromkeys(seen)) or "no python3 was found"
    raise VenvError(
        f"{host}: the trainer needs Python {minimum} or newer, but {what}. {python_hint()}",
        "python",
    )


def ask_interpreter(run: Run, path: str) -> HostInterpreter | None:
    """Ask a Python about itself; None if it is not one or does not run."""
    rc, out, _err = run([path, "-c", ASK_INTERPRETER])
    try:
        told = json.loads(out) if rc == 0 else None
    except ValueError:
        told = None
    version = told.get("version") if isinstance(told, dict) else None
    # A file named python may be any program and print anything.
    if not isinstance(told, dict) or not isinstance(version, list) or [type(part) for part in version] != [int] * 3:
        return None
    libc = told.get("libc")
    return HostInterpreter(
        str(told.get("executable") or path),
        (version[0], version[1], version[2]),
        str(told.get("machine", "")),
        bool(told.get("venv")),
        bool(told.get("ensurepip")),
        bool(told.get("pip")),
        "-".join(map(str, libc)) if isinstance(libc, list) and any(libc) else "",
        str(told.get("system", "Linux")),
    )


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def install_hint(what: str, minor: str = "", release: str = "/etc/os-release") -> str:
    """The command to install what is missing."""
    names = " ".join(re.findall(r"^(?:ID|ID_LIKE)=\"?([^\"\n]*)", read_text(release), re.M)).split()
    version = minor or "3"
    packed = version.replace(".", "")
    commands = {
        "debian": {
            "python": f"apt install python{version} python{version}-venv",
            "venv": f"apt install python{version}-venv",
        },
        "fedora": {"python": f"dnf install python{version}", "venv": f"dnf install python{version}-pip"},
        "arch": {"python": "pacman -S python", "venv": "pacman -S python-pip"},
        "suse": {"python": f"zypper install python{packed}", "venv": f"zypper install python{packed}-pip"},
        "alpine": {"python": "apk add python3", "venv": "apk add py3-pip"},
    }
    same = {"ubuntu": "debian", "rhel": "fedora"}
    for name in (same.get(name, name) for name in names):
        if name in commands:
            return f"Install it there with `sudo {commands[name][what]}`"
    return f"Install Python {version} with its venv module there"


def python_hint() -> str:
    """The ways to a newer Python."""
    return f"{install_hint('python')}; or without root: {MAKE_PYTHON}; or set ddp_python to another one"
