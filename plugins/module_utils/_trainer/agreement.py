# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether all hosts have the same trainer and packages. Pure functions."""

from __future__ import annotations

from typing import Any, Iterator, Mapping


def disagreements(files: Mapping[str, Mapping[str, Any]], venvs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each host that differs from the first: files (of trainer_files) and venvs (of trainer_venv), by host."""
    hosts = list(files)
    first = hosts[0]
    for host in hosts[1:]:
        if files[host]["digest"] != files[first]["digest"]:
            yield f"{host} has other trainer files than {first}; run --tags trainer again"
        elif not same_packages(venvs[first], venvs[host]):
            yield (
                f"{host} has {versions_text(venvs[host])}, {first} has {versions_text(venvs[first])}; ranks of different "
                f"versions would disagree. Remove {venvs[host]['venv']} there and run --tags trainer again"
            )


def same_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """The same torch, and the same versions of all where the Python is the same."""
    if public(one["torch"]) != public(other["torch"]):
        return False
    # Another Python may need another version of what only reads data.
    return versions(one) == versions(other) or one["python_version"] != other["python_version"]


def versions(venv: Mapping[str, Any]) -> dict[str, str]:
    """Package -> version as it was released, without the kind of build."""
    return {name: public(version) for name, version in venv["packages"].items()}


def versions_text(venv: Mapping[str, Any]) -> str:
    """For people."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions(venv).items())) or "no packages"


def public(version: Any) -> str:
    """2.13.0+cpu is 2.13.0."""
    return str(version or "").partition("+")[0]
