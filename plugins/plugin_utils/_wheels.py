# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The locks of the trainer's packages, and the wheels that they name, fetched by the controller from its own package indexes."""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ansible.errors import AnsibleActionFail

from ..module_utils._contract.versions import UV
from ..module_utils._kit.files import locked, write_whole
from ..module_utils._trainer.pip_settings import fetched, folders, indexes, pip_settings
from ..module_utils._trainer.uv_errors import CPU_INDEX

DEFAULT_INDEX = "https://pypi.org/simple"
TRAINER = Path(__file__).parents[2] / "trainer"
SECONDS = 60
PACKAGE = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;\\]+)\s*(?:;\s*([^\\\n]+?))?\s*\\?\n((?:\s+--hash=sha256:[0-9a-f]{64}\s*\\?\n)+)", re.M
)
LINK = re.compile(r"""href=["']([^"'#]+)(?:#sha256=([0-9a-f]{64}))?""")


def cache_folder() -> Path:
    """Where the controller keeps what it fetched."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("NANOCHAT_DDP_HOME") or os.path.join(base, "nanochat-ddp"))


class Package(NamedTuple):
    """A package of a lock."""

    name: str
    version: str
    marker: str
    digests: tuple[str, ...]


class Lock(NamedTuple):
    """The locks that one environment is made from."""

    text: str
    digest: str
    pins: dict[str, list[str]]


def read_lock(folder: Path, names: Sequence[str], torch_index: str) -> Lock:
    """The text of the named locks, in which the trainer's own depends on the build of torch."""
    build = {"trainer": "trainer-default" if torch_index == "default" else "trainer-cpu"}
    texts = []
    for name in names:
        path = folder / "locks" / f"{build.get(name, name)}.txt"
        if not path.is_file():
            raise AnsibleActionFail(f"there is no lock {path} on the controller")
        texts.append(path.read_text(encoding="utf-8"))
    text = "\n".join(texts)
    checked = set(" ".join(re.findall(r"^# Checked: (.*)$", text, re.M)).split())
    pins: dict[str, list[str]] = {}
    for one in packages(text):
        if one.name in checked:
            pins.setdefault(one.name, []).append(one.version.partition("+")[0])
    return Lock(text, hashlib.sha256(text.encode()).hexdigest()[:16], pins)


def packages(text: str) -> list[Package]:
    """The packages of a lock."""
    return [
        Package(name, version, marker, tuple(re.findall(r"sha256:([0-9a-f]{64})", digests)))
        for name, version, marker, digests in PACKAGE.findall(text)
    ]


def bring_wheels(text: str, python: str, machine: str, folder: Path) -> bool:
    """Fetch what a lock names for a Python and an architecture; whether any wheel was missing."""
    # Comes with ansible-core, but not with the Python that checks what this file imports.
    from packaging.markers import Marker

    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    environment.update(sys_platform="linux", platform_system="Linux", implementation_name="cpython")
    changed, wanted = False, set()
    for one in packages(text):
        if not one.marker or Marker(one.marker).evaluate(dict(environment)):
            name, fetched = bring_wheel(one, python, machine, folder)
            wanted.add(name)
            changed |= fetched
    for other in set(os.listdir(folder)) - wanted:
        (folder / other).unlink()
    return changed


def bring_wheel(package: Package, python: str, machine: str, folder: Path) -> tuple[str, bool]:
    """The wheel's name in the folder, and whether it had to be fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = list(supported(python, machine))
    for path in sorted(folder.glob("*.whl")):
        if is_for(path.name, package, tags) and hashlib.sha256(path.read_bytes()).hexdigest() in package.digests:
            return path.name, False
    seen = []
    for url, digest in links(package):
        name = urllib.parse.unquote(url.rsplit("/", 1)[-1])
        if is_for(name, package, tags) and (not digest or digest in package.digests):
            content = fetch(url)
            if hashlib.sha256(content).hexdigest() in package.digests:
                write_whole(str(folder / name), content)
                return name, True
            seen.append(f"{url} has another digest")
    asked = ", ".join(places(package)) or "none"
    raise AnsibleActionFail(
        f"the controller could not fetch {package.name} {package.version} for Python {python} on {machine}: "
        f"{'; '.join(seen) or 'no package index of it has that wheel'} (asked: {asked}). Connect the controller, set its index in "
        f"pip.conf, or put the wheel into {folder}"
    )


def supported(python: str, machine: str) -> Iterator[str]:
    """Tags of wheels that run on Linux with a glibc of the last ten years."""
    from packaging.tags import compatible_tags, cpython_tags

    version = tuple(int(part) for part in python.split("."))
    older = [f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    platforms = [*(f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)), *older, "any"]
    yield from map(str, cpython_tags(version, platforms=platforms))
    yield from map(str, compatible_tags(version, f"cp{version[0]}{version[1]}", platforms))


def is_for(name: str, package: Package, tags: Sequence[str]) -> bool:
    """Whether a file is the package's wheel for one of the tags."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        project, version, dummy, offered = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return False
    same = project == package.name.replace("_", "-").lower() and str(version) == package.version
    return same and any(str(tag) in tags for tag in offered)


def places(package: Package) -> list[str]:
    """Folders and indexes of the controller, and for a CPU build that of PyTorch."""
    settings = pip_settings()
    found = indexes(settings, DEFAULT_INDEX)
    return [*folders(settings), *found, *([CPU_INDEX] if found and "+cpu" in package.version else [])]


def links(package: Package) -> Iterator[tuple[str, str]]:
    """Every file of a project in these places, with its digest if the page tells it."""
    for place in places(package):
        local = place[len("file://") :] if place.startswith("file://") else place
        if os.path.isdir(local):
            for folder in (local, os.path.join(local, package.name)):
                for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                    yield "file://" + os.path.join(folder, name), ""
        if "://" in place:
            page = place if place in folders(pip_settings()) else f"{place.rstrip('/')}/{package.name}/"
            try:
                text = fetch(page + ("index.html" if page.startswith("file://") else "")).decode("utf-8", "replace")
            except AnsibleActionFail:
                continue
            for link, digest in LINK.findall(text):
                yield urllib.parse.urljoin(page, link.replace("&amp;", "&")), digest


def fetch(url: str) -> bytes:
    """The content of a page or file."""
    try:
        return fetched(url, pip_settings(), SECONDS)
    except (OSError, ValueError) as why:
        raise AnsibleActionFail(f"{url} could not be fetched: {why}") from why


def bring_uv(cache: Path, machine: str) -> Path:
    """uv for an architecture, unpacked from its wheel."""
    program = cache / "uv" / f"{UV.replace('==', '-')}-{machine}"
    if program.is_file():
        return program
    (package,) = packages((TRAINER / "locks" / "uv.txt").read_text(encoding="utf-8"))
    folder = cache / "uv" / f"wheel-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(str(program) + ".lock", 600):
        name = bring_wheel(package, "3.12", machine, folder)[0]
        with zipfile.ZipFile(folder / name) as wheel:
            inside = next(one for one in wheel.namelist() if one.endswith(".data/scripts/uv"))
            write_whole(str(program), wheel.read(inside), 0o755)
        (folder / name).unlink()
    return program
