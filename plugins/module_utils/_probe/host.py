# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of one host for the plan and preflight. Read-only."""

from __future__ import annotations

import glob
import os
import platform
import re
import socket
import sys
from typing import Sequence, cast

from .._contract.probe import Measured, Probe, Python, PythonFacts
from .._contract.run_folder import MEASURED, PYTHON_FOLDER, PYTHON_IN_FOLDER, venv_kind
from .._kit import bare
from .._kit.files import read_object
from .._kit.logind import logind
from .._kit.processes import user_name
from .leftovers import data_sets, port_holders, run_facts, trainer_processes
from .machine import cpu, disk, limits, memory, usage
from .network import names_and_routes, nics, read
from .sources import folder_facts

PYTHON_CHECK = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
TEST_PROGRAM = os.path.join("scripts", "gloo_check.py")
# Folders of pyenv and uv contain the version in their name.
VERSION_IN_PATH = re.compile(r"/(?:cpython-)?3\.(\d+)(?:\.\d+)?[^/]*/bin/")


def host_info(
    base_dir: str,
    run_dir: str | None = None,
    venv_dir: str | None = None,
    python: str | None = None,
    ports: Sequence[int] = (),
    peers: Sequence[str] = (),
    folders: Sequence[str] = (),
    base_run: str | None = None,
) -> dict[str, Probe]:
    """All facts of this host; base_run is the run whose model this one uses."""
    base = expand(base_dir)
    interfaces = nics()
    names, routes = names_and_routes(peers, interfaces)
    rights = "root" if os.geteuid() == 0 else "none"
    if rights == "none" and bare.tool(["sudo", "-n", "true"])[0] == 0:
        rights = "passwordless"
    low, high = read("/proc/sys/net/ipv4/ip_local_port_range", "32768 60999").split()
    user = user_name(os.getuid())
    probe: Probe = {
        "host": {
            "hostname": socket.gethostname(),
            "boot_id": read("/proc/sys/kernel/random/boot_id"),
            "network_namespace": os.readlink("/proc/self/ns/net"),
            "arch": platform.machine(),
            "user": user,
            "home": os.path.expanduser("~"),
        },
        "python": pythons(expand(python) if python else None, base, expand(venv_dir or os.path.join(base, "venv"))),
        "cpu": cpu(),
        "memory": memory(),
        "disk": disk(base),
        "nics": interfaces,
        "routes": routes,
        "names": names,
        "sudo": rights,
        "tmux": {"path": bare.find("tmux")},
        "trainer": os.path.exists(os.path.join(base, "trainer", TEST_PROGRAM)),
        "ports": port_holders(ports, ["sudo", "-n"] if rights == "passwordless" else []),
        "processes": trainer_processes(),
        "limits": limits(),
        "logout": logind(user)._asdict(),
        "ephemeral": {"low": int(low), "high": int(high)},
        "base_dir": base,
        "run": run_facts(expand(run_dir)) if run_dir else None,
        "base_run": run_facts(os.path.join(base, "runs", base_run)) if base_run else None,
        "data": data_sets(base),
        "folders": {path: folder_facts(path) for path in folders},
        "measured": cast(Measured, read_object(os.path.join(base, MEASURED))) or None,
        "usage": usage(),
    }
    return {"probe": probe}


def expand(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


# Software


def python_paths(wanted: str | None, base: str) -> list[str]:
    """Interpreters to try, each once; skips pyenv's shims, which are slow and only lead to others in the list."""
    home = os.path.expanduser("~")
    by_version = [bare.find("python3.%d" % minor) for minor in (15, 14, 13, 12, 11, 10)]
    named = [*by_version, bare.find("python3"), sys.executable]
    patterns = (
        os.path.join(glob.escape(base), PYTHON_FOLDER, PYTHON_IN_FOLDER),
        home + "/.local/bin/python3.1?",
        home + "/.pyenv/versions/*/bin/python3",
        home + "/.local/share/uv/python/*/bin/python3",
        # On PATH they may be hidden by a shim of the same name.
        "/usr/local/bin/python3.1?",
        "/usr/bin/python3.1?",
        "/usr/bin/python3",
        "/opt/*/bin/python3",
    )
    paths = [wanted] if wanted else []
    paths += [path for path in named if path] + [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    unique: dict[str, str] = {}
    for path in paths:
        version = VERSION_IN_PATH.search(path)
        if "/shims/" not in path and not (version and int(version.group(1)) < 10):
            unique.setdefault(os.path.realpath(path), path)
    return list(unique.values())[:12]


def pythons(wanted: str | None, base: str, venv: str) -> PythonFacts:
    """This interpreter's version, candidates for the trainer's environment, the library's folder, and that environment."""
    candidates: list[Python] = []
    for path in python_paths(wanted, base):
        out = bare.tool([path, "-I", "-S", "-c", PYTHON_CHECK])[1]
        if version := re.match(r"\s*(3\.\d\d+\.\d+)", out):
            candidates.append({"executable": path, "version": version.group(1)})
    installed = glob.glob(os.path.join(venv, "lib", "python3*", "site-packages", "torch-*.dist-info"))
    match = re.search(r"torch-(.+)\.dist-info$", installed[0]) if installed else None
    return {
        "version": "%d.%d.%d" % sys.version_info[:3],
        "candidates": candidates,
        "library": os.path.dirname(os.path.abspath(os.__file__)),
        "venv": {
            "exists": os.path.exists(os.path.join(venv, "bin", "python")),
            "kind": venv_kind(venv),
            "torch": match.group(1) if match else None,
            "disk": disk(venv, owned=False),
        },
    }
