# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses the interpreter for each host's trainer environment; one version for all hosts if possible."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import MADE_PYTHON, PYTHONS
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.plan import Interpreter
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.hosts import (
    Host,
    home_expanded,
    made_python,
    makes_python,
    pythons,
    version_of,
)

# The oldest Python that PyTorch runs on.
OLDEST_PYTHON = (3, 10)


def choose(host: Host, hosts: Sequence[Host], base: str, offline: bool) -> Interpreter:
    """The configured one, or the host's best, or one to install; None if impossible."""
    wanted = host.settings.python
    if wanted:
        return interpreter(home_expanded(wanted, host), host)
    candidates = pythons(host, OLDEST_PYTHON)
    each = [{version_of(entry) for entry in pythons(other, OLDEST_PYTHON)} for other in hosts if other.probe]
    common = set.intersection(*each) if each else set()
    used = host.fact("python", "version")
    order = sorted(candidates, key=lambda entry: preference(entry, common, used))
    if order:
        return interpreter(str(order[0]["executable"]), host)
    if makes_python(host, offline):
        return {"python": made_python(base), "python_version": MADE_PYTHON}
    return {"python": None, "python_version": None}


def interpreter(path: str, host: Host) -> Interpreter:
    """A Python of the host with its version, if known."""
    known = [version_of(entry) for entry in pythons(host, OLDEST_PYTHON) if entry["executable"] == path]
    return {"python": path, "python_version": "%d.%d" % known[0] if known else None}


def preference(entry: Mapping[str, Any], common: Any, used: str | None) -> tuple[bool, bool, bool, bool, int]:
    """Sort key: can create environments, common to all hosts, packages surely exist for it, used by Ansible there."""
    version = version_of(entry)
    place = PYTHONS.index(version) if version in PYTHONS else len(PYTHONS)
    return (
        not entry.get("venv_module"),
        version not in common,
        version not in PYTHONS,
        entry["version"] != used,
        place,
    )
