# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether all hosts have the same trainer and packages. Pure functions."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence


def disagreements(files: Mapping[str, Mapping[str, Any]], venvs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each host that differs from the first: files (of trainer_files) and venvs (of trainer_venv), by host."""
    hosts = list(files)
    first = hosts[0]
    for host in hosts[1:]:
        if files[host]["digest"] != files[first]["digest"]:
            yield f"{host} has other trainer files than {first}; run --tags trainer again"
        elif not same_packages(venvs[first], venvs[host]):
            names = differing(venvs[first], venvs[host]) or ["torch"]
            yield (
                f"{host} has {versions_text(venvs[host], names)}, {first} has {versions_text(venvs[first], names)}; ranks of "
                f"different versions would disagree. Remove {venvs[host]['venv']} there and run --tags trainer again"
            )


def same_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """The same torch, and the same versions of all where the Python is the same."""
    if public(one["torch"]) != public(other["torch"]):
        return False
    # Another Python may need another version of what only reads data.
    return not differing(one, other) or one["python_version"] != other["python_version"]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The packages of which both have another version; what only one of them has, the other was not asked to have."""
    ours, theirs = versions(one), versions(other)
    return sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])


def versions(venv: Mapping[str, Any]) -> dict[str, str]:
    """Package -> version as it was released, without the kind of build."""
    return {name: public(version) for name, version in venv["packages"].items()}


def versions_text(venv: Mapping[str, Any], names: Sequence[str]) -> str:
    """For people; of torch, which is told by itself, even where it is not among the packages."""
    found = {"torch": public(venv["torch"]) or "none", **versions(venv)}
    return ", ".join(f"{name} {found[name]}" for name in names)


def public(version: Any) -> str:
    """2.13.0+cpu is 2.13.0."""
    return str(version or "").partition("+")[0]
