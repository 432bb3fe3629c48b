# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The locks of the trainer's packages, and the wheels that they name, fetched by the controller's pip."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ansible.errors import AnsibleActionFail

from ..module_utils._contract.versions import UV
from ..module_utils._kit.files import hash_file, locked, write_whole
from ..module_utils._trainer.uv import CPU_INDEX

TRAINER = Path(__file__).parents[2] / "trainer"
PACKAGE = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;\\]+)\s*(?:;\s*([^\\\n]+?))?\s*\\?\n((?:\s+--hash=sha256:[0-9a-f]{64}\s*\\?\n)+)", re.M
)


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


def read_lock(folder: Path, names: Sequence[str], torch_index: str) -> dict[str, object]:
    """Text, digest and checked versions of the named locks, as trainer_venv takes them; the trainer's own depends on the build of torch."""
    build = {"trainer": "trainer-default" if torch_index == "default" else "trainer-cpu"}
    files = [folder / "locks" / f"{build.get(name, name)}.txt" for name in names]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    checked = set(" ".join(re.findall(r"^# Checked: (.*)$", text, re.M)).split())
    pins: dict[str, list[str]] = {}
    for one in packages(text):
        if one.name in checked:
            pins.setdefault(one.name, []).append(one.version.partition("+")[0])
    return {"lock": text, "digest": hashlib.sha256(text.encode()).hexdigest()[:16], "pins": pins}


def packages(text: str) -> list[Package]:
    """The packages of a lock."""
    return [
        Package(name, version, marker, tuple(re.findall(r"sha256:([0-9a-f]{64})", digests)))
        for name, version, marker, digests in PACKAGE.findall(text)
    ]


def bring_wheels(text: str, python: str, machine: str, folder: Path) -> dict[str, tuple[str, int]]:
    """Fetch what a lock names for a Python and an architecture; the digest and size of each wheel by its name."""
    # Comes with ansible-core, but not with the Python that checks what this file imports.
    from packaging.markers import Marker

    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    environment.update(sys_platform="linux", platform_system="Linux", implementation_name="cpython")
    # pip evaluates markers for its own Python.
    wanted = [one for one in packages(text) if not one.marker or Marker(one.marker).evaluate(dict(environment))]
    folder.mkdir(parents=True, exist_ok=True)
    there = {path: hash_file(str(path)) for path in folder.iterdir()}
    for path in set(there) - {path for one in wanted for path, digest in there.items() if digest in one.digests}:
        path.unlink()
    lacking = [one for one in wanted if not {*one.digests} & {*there.values()}]
    # PyTorch's index is asked for nothing else, and where it does not answer the controller's own may have that build.
    for index in (CPU_INDEX, ""):
        some = [one for one in lacking if ("+cpu" in one.version) is bool(index)]
        if some:
            download(some, python, machine, folder, *(["--extra-index-url", index] if index else []))
    return {path.name: (there.get(path) or hash_file(str(path)), path.stat().st_size) for path in folder.iterdir()}


def download(wanted: Sequence[Package], python: str, machine: str, folder: Path, *more: str) -> None:
    """Fetch wheels as the controller's pip is configured to, each of a digest that the lock names."""
    runs_pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "tool", "run", "pip"]
    # Those of a glibc of the last ten years.
    tags = [*(f"manylinux_2_{minor}" for minor in range(36, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1"]
    lines = [" --hash=sha256:".join([f"{one.name}==={one.version}", *one.digests]) for one in wanted]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write("\n".join(lines) + "\n")
        lock.flush()
        argv = [*runs_pip, "download", "--quiet", "--disable-pip-version-check", "--retries=1", "--no-deps"]
        argv += ["--only-binary=:all:", "--require-hashes", f"--dest={folder}", *more]
        argv += [f"--python-version={python}", "--implementation=cp"]
        argv += [*(f"--platform={tag}_{machine}" for tag in tags), f"--requirement={lock.name}"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise AnsibleActionFail(
                "the controller has no pip: install it (sudo apt-get install python3-pip)"
            ) from None
    if done.returncode:
        names = ", ".join(f"{one.name} {one.version}" for one in wanted)
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise AnsibleActionFail(
            f"the controller could not fetch for Python {python} on {machine}: {names}. pip said: {(said or [done.stderr.strip()])[-1]} "
            f"Connect the controller, set its index in pip.conf, or put the wheels into {folder}"
        )


def bring_uv(cache: Path, machine: str) -> Path:
    """uv for an architecture, unpacked from its wheel."""
    program = cache / "uv" / f"{UV.replace('==', '-')}-{machine}"
    folder = cache / "uv" / f"wheel-{machine}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(str(program) + ".lock", 600):
        if program.is_file():
            return program
        bring_wheels((TRAINER / "locks" / "uv.txt").read_text(encoding="utf-8"), "3.12", machine, folder)
        (path,) = folder.iterdir()
        with zipfile.ZipFile(path) as wheel:
            inside = next(one for one in wheel.namelist() if one.endswith(".data/scripts/uv"))
            write_whole(str(program), wheel.read(inside), 0o755)
        path.unlink()
    return program
