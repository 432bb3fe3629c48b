# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether all hosts have the same trainer, packages and data. Pure functions."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Sequence

Found = Mapping[str, Any]


def disagreements(found: Mapping[str, Mapping[str, Found]]) -> Iterator[str]:
    """A sentence for each host that differs from the first; `found` has files, venv and data (as far as they are compared) by host."""
    for part, differs in PARTS.items():
        hosts = list(found.get(part, ()))
        for host in hosts[1:]:
            yield from differs(host, found[part][host], hosts[0], found[part][hosts[0]])


def other_files(host: str, one: Found, first: str, right: Found) -> Iterator[str]:
    """Compare what trainer_files returned."""
    if one["digest"] != right["digest"]:
        yield f"{host} has different trainer files from {first}; run --tags trainer again."


def other_packages(host: str, one: Found, first: str, right: Found) -> Iterator[str]:
    """Compare what trainer_venv returned."""
    if not same_packages(right, one):
        names = differing(right, one) or ["torch"]
        yield (
            f"{host} has {versions_text(one, names)}, {first} has {versions_text(right, names)}; ranks of "
            f"different versions would disagree. Remove {one['venv']} there and run --tags trainer again."
        )


def other_data(host: str, one: Found, first: str, right: Found) -> Iterator[str]:
    """Compare the files that the run reads."""
    if one["digest"] != right["digest"]:
        yield (
            f"{host} reads different files from {first}: {one['digest']} in its run folder, {right['digest']} there. "
            "Run --tags data again, with -e data_verify=full if it persists."
        )


PARTS: Mapping[str, Callable[[str, Found, str, Found], Iterator[str]]] = {
    "files": other_files,
    "venv": other_packages,
    "data": other_data,
}


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
