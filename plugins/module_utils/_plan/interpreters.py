# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Pythons of the hosts; chooses one for each trainer environment, of one version on all hosts if possible."""

from __future__ import annotations

import os
from typing import Sequence

from .._contract.probe import Python
from .._contract.run_folder import PYTHON_FOLDER, PYTHON_IN_FOLDER
from .._contract.versions import MADE_PYTHON, PYTHONS
from .hosts import Host, home_expanded

# The oldest Python that PyTorch runs on.
OLDEST_PYTHON = (3, 10)


def version_of(entry: Python) -> tuple[int, int]:
    """Major and minor version of an interpreter of the probe."""
    major, minor = str(entry["version"]).split(".")[:2]
    return int(major), int(minor)


def pythons(host: Host) -> list[Python]:
    """The host's interpreters that are new enough."""
    return [entry for entry in host.fact("python", "candidates") or [] if version_of(entry) >= OLDEST_PYTHON]


def made_python(base: str) -> str:
    """The interpreter to install below the base folder if there is none."""
    return os.path.join(base, PYTHON_FOLDER, PYTHON_IN_FOLDER)


def choose(host: Host, hosts: Sequence[Host], base: str, offline: bool) -> tuple[str | None, str | None]:
    """(path, version): the configured one, or the host's best, or one to install; None if impossible or unknown."""
    wanted = host.settings.python
    if wanted:
        path = home_expanded(wanted, host)
        known = [version_of(entry) for entry in pythons(host) if entry["executable"] == path]
        return path, "%d.%d" % known[0] if known else None
    each = [{version_of(entry) for entry in pythons(other)} for other in hosts if other.probe]
    common = set.intersection(*each) if each else set()
    used = host.fact("python", "version")

    def preference(entry: Python) -> tuple[bool, bool, bool, int]:
        """One that all hosts have, packages surely exist for, and Ansible uses there."""
        version = version_of(entry)
        place = PYTHONS.index(version) if version in PYTHONS else len(PYTHONS)
        return version not in common, version not in PYTHONS, entry["version"] != used, place

    best = min(pythons(host), key=preference, default=None)
    if best:
        return str(best["executable"]), "%d.%d" % version_of(best)
    return (made_python(base), MADE_PYTHON) if host.probe and not offline else (None, None)
