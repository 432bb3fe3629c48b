# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether all hosts have the same trainer, packages and data. Pure functions."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

DIFFERS = {
    "files": "{host} has different trainer files from {first}; run --tags trainer again.",
    "data": "{host} reads different files from {first}: {one} in its run folder, {right} there. "
    "Run --tags data again, with -e data_verify=full if it persists.",
}


def disagreements(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A sentence for each host that differs from the first; `found` has files, venv and data (if compared) by host."""
    for part, of_hosts in found.items():
        (first, right), *others = of_hosts.items()
        for host, one in others:
            if part != "venv" and one["digest"] != right["digest"]:
                yield DIFFERS[part].format(host=host, first=first, one=one["digest"], right=right["digest"])
            if part == "venv" and not same_packages(right, one):
                names = differing_packages(right, one) or ["torch"]
                yield (
                    f"{host} has {versions_text(one, names)}, {first} has {versions_text(right, names)}; ranks of "
                    f"different versions would disagree. Remove {one['venv']} there and run --tags trainer again."
                )


def same_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether torch is the same, and all packages too if the Python is."""
    if public(one["torch"]) != public(other["torch"]):
        return False
    # Another Python may need another version of packages that only read data.
    return not differing_packages(one, other) or one["python_version"] != other["python_version"]


def differing_packages(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Packages with different versions; those that only one has were not required of the other."""
    ours, theirs = versions(one), versions(other)
    return sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])


def versions(venv: Mapping[str, Any]) -> dict[str, str]:
    """Package -> released version, without the build tag."""
    return {name: public(version) for name, version in venv["packages"].items()}


def versions_text(venv: Mapping[str, Any], names: Sequence[str]) -> str:
    """For people; torch is always listed."""
    found = {"torch": public(venv["torch"]) or "none", **versions(venv)}
    return ", ".join(f"{name} {found[name]}" for name in names)


def public(version: Any) -> str:
    """2.13.0+cpu is 2.13.0."""
    return str(version or "").partition("+")[0]
