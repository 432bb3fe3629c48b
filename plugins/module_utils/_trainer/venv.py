# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trainer's virtual environment on a host, made by uv from a lock: a list of packages with the digests of their wheels.

A mark is written first, and last a stamp with the lock's digest. An environment with a mark but no stamp is half-built, and is
rebuilt; one with neither belongs to somebody else: it is used if it has the packages, but never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from .._contract.run_folder import PYTHON_IN_FOLDER, PYTHON_MARK, VENV_MARK, VENV_STAMP, venv_kind
from .._contract.versions import MADE_PYTHON, UV, VENV_BYTES
from .._kit.bare import run
from .._kit.files import Busy, folder_problem, locked, paths_in, read_object, write_json, write_whole
from .files import digest_at, use_of
from .uv import ANSWER_SECONDS, CPU_INDEX, VenvError, answers, explain, for_uv, last_line, pip_settings

OLDEST_PYTHON = (3, 10)
LOCK_SECONDS = 1800  # how long another build of the same environment is waited for
ASK_PYTHON = "import json, sys; print(json.dumps(sys.version_info[:2]))"


def trainer_venv(host: str, check: bool = False, **wanted: Any) -> dict[str, object]:
    """Make an environment (wanted: the fields of Venv) with uv unless it is there, or tell what that would change.

    Where uv is not beside it, `lacks_uv` is its architecture. Of a failure `lacks_packages` tells whether others than those that it can
    reach would help.
    """
    venv = Venv(host, **wanted)
    tags: Optional[dict[str, str]] = None
    lacks_uv: Optional[str] = None
    try:
        tags = venv.tags
        # Somebody else's environment is only read, and its folder may not be writable for a lock.
        with contextlib.nullcontext() if check or venv_kind(venv.path) == "foreign" else building(venv.path, host):
            before, changed = venv.packages(), not venv.is_ready()
            if changed:
                venv.refuse()
            if changed and not check and not os.access(venv.uv, os.X_OK):
                changed, lacks_uv = False, os.uname().machine
            elif changed and not check:
                venv.build()
            packages = venv.packages()
    except VenvError as why:
        return {"failed": True, "msg": str(why), "lacks_packages": why.lacks_packages, "tags": tags}
    except OSError as why:
        return {"failed": True, "msg": f"{host}: {why.filename or venv.path}: {why.strerror or why}"}
    after = {name: versions[-1] for name, versions in venv.pins.items()} if changed and check else packages
    both = {"before": before, "after": after}
    diff = {when: "".join(f"{name}=={found[name]}\n" for name in sorted(found)) for when, found in both.items()}
    return {"changed": changed, "lacks_uv": lacks_uv, "packages": packages, "tags": tags, "diff": diff}


def lacking_wheels(path: str, wheels: Mapping[str, tuple[str, int]], host: str) -> dict[str, object]:
    """Which of these wheels (name -> digest, size) a folder lacks, with room for them; other files there are removed."""
    there = {os.path.basename(one): digest_at(one) for one in paths_in(path) if os.path.isfile(one)}
    lacking = [name for name, (digest, dummy) in wheels.items() if there.get(name) != digest]
    for name in there.keys() - (wheels.keys() - lacking):
        os.unlink(os.path.join(path, name))
    check_room(path, sum(wheels[name][1] for name in lacking), host, "ddp_base_dir")
    return {"lacking": lacking}


def remove_venv(path: str, host: str, check: bool) -> bool:
    """Remove an environment with all that was kept beside it, or tell whether it would be; not what only has its path."""
    venv, kind = Venv(host, path), venv_kind(path)
    # Of a removal that was interrupted, or of a first try that found no room.
    is_rest = kind == "absent" and any(map(os.path.exists, (path + ".trash", uv_beside(path))))
    if kind != "ours" and not is_rest:
        return False
    venv.refuse()
    if not check:
        with building(path, host):
            venv.discard()
        for leftover in (path + ".lock", uv_beside(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)
        shutil.rmtree(venv.cache, ignore_errors=True)
    return True


def uv_beside(path: str) -> str:
    """Where uv is kept for an environment: beside it, for all that lie there."""
    return os.path.join(os.path.dirname(path.rstrip("/")), UV.replace("==", "-"))


@dataclasses.dataclass
class Venv:
    """One environment on this host, as it is wanted."""

    host: str
    path: str
    digest: str = ""  # of the lock
    # What the trainer imports, with the lock's versions.
    pins: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    lock: str = ""  # its text, in uv's format; only needed to install
    python: str = ""  # the interpreter that makes it; one that the plan would have made may be absent
    wheels_dir: str = ""  # a folder with one of wheels for each kind of host
    offline: bool = False  # only from there

    def __post_init__(self) -> None:
        self.path, self.python = self.path.rstrip("/"), self.python or sys.executable
        self.own_python, self.uv = os.path.join(self.path, "bin", "python"), uv_beside(self.path)
        # uv's; on the environment's own disk, so that files are linked and not copied.
        self.cache = self.path + ".cache"

    @property
    def makes_python(self) -> bool:
        """Whether the interpreter is one that uv installs, and is not there yet."""
        return self.python.endswith("/" + PYTHON_IN_FOLDER) and not os.path.exists(self.python)

    @functools.cached_property
    def tags(self) -> dict[str, str]:
        """The tags that wheels must match, of the interpreter: its version (3.11), its machine, and the name of their folder."""
        version, machine = MADE_PYTHON, os.uname().machine
        if not self.makes_python:
            dummy, out, err = run([self.python, "-I", "-c", ASK_PYTHON])
            try:
                major, minor = json.loads(out)
                problem = f"is Python {major}.{minor}, and the trainer needs 3.10 or newer"
            except (ValueError, TypeError):
                major, minor = 0, 0
                problem = f"does not run as a Python ({last_line(err or out)})"
            if (major, minor) < OLDEST_PYTHON:
                advice = "set ddp_python to another, or leave it empty"
                raise VenvError(f"{self.host}: {self.python} {problem}; {advice}")
            version = f"{major}.{minor}"
        return {"python": version, "machine": machine, "kind": f"{version}-{machine}"}

    def stamp(self) -> dict[str, object]:
        """The stamp of the environment; empty if it was never finished."""
        return read_object(os.path.join(self.path, VENV_STAMP))

    def is_ready(self) -> bool:
        """Whether it can be used as it is: ours, from this lock and Python, or somebody else's with the packages."""
        is_right = self.has_its_python() and self.stamp().get("digest") == self.digest
        return (is_right or venv_kind(self.path) == "foreign") and not self.lacking()

    def has_its_python(self) -> bool:
        """Whether it was finished, and has the Python that is wanted still."""
        return self.stamp().get("python") == self.tags["python"] and os.access(self.own_python, os.X_OK)

    def packages(self) -> dict[str, str]:
        """Installed versions of the pinned packages."""
        found = {}
        for place in glob.glob(os.path.join(glob.escape(self.path), "lib", "python3*", "site-packages", "*.dist-info")):
            name, _dash, version = os.path.basename(place)[: -len(".dist-info")].partition("-")
            found[re.sub(r"[-_.]+", "-", name).lower()] = version
        return {name: found[name] for name in self.pins if name in found}

    def lacking(self) -> list[str]:
        """Pinned packages whose installed version the lock does not name; a build (+cpu) is not compared."""
        there = self.packages()
        return [
            f"{name}=={versions[-1]}"
            for name, versions in sorted(self.pins.items())
            if there.get(name, "").partition("+")[0] not in versions
        ]

    def refuse(self) -> None:
        """Refuse to change what is not ours, and what a training uses."""
        told = {
            "occupied": "exists and is not a virtual environment, so it was not touched;",
            "foreign": "is a virtual environment that this collection did not create, so it is not changed, but it lacks "
            f"{', '.join(self.lacking())}; install that there, or",
        }.get(venv_kind(self.path))
        if told:
            raise VenvError(f"{self.host}: {self.path} {told} give another folder (ddp_venv_dir)")
        if use := use_of(self.path):
            raise VenvError(f"{self.host}: {use}")

    def build(self) -> None:
        """Make or update the environment; the stamp comes last."""
        check_room(os.path.dirname(self.path), VENV_BYTES if "torch" in self.pins else 0, self.host)
        # Update a finished environment of the same Python; rebuild any other.
        fresh = not self.has_its_python()
        if fresh:
            self.discard()
        os.makedirs(self.path, exist_ok=True)
        write_whole(os.path.join(self.path, VENV_MARK), f"{os.getpid()}\n")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, VENV_STAMP))
        if self.makes_python:
            self._make_python()
        if fresh:
            self._uv("venv", "--quiet", "--allow-existing", "--python", self.python, self.path)
        self._install()
        # Their modules are named like the packages, that of mlflow-skinny like mlflow.
        modules = ", ".join(name.partition("-")[0] for name in self.pins)
        code, out, err = run([self.own_python, "-I", "-c", f"import {modules}"])
        if code != 0:
            told = f"the trainer would not start with {self.path}: {last_line(err or out)}"
            raise VenvError(f"{self.host}: {told}. Remove it, and run --tags trainer again")
        write_json(os.path.join(self.path, VENV_STAMP), {"digest": self.digest, "python": self.tags["python"]})
        os.unlink(os.path.join(self.path, VENV_MARK))
        # Kept after a broken attempt only, so that the next one continues from there.
        shutil.rmtree(self.cache, ignore_errors=True)

    def discard(self) -> None:
        """Remove the environment, renaming it first: a half-removed one must not look like somebody else's."""
        # A link to it stays, so that it is rebuilt on the disk where its owner wants it.
        place = os.path.realpath(self.path)
        trash = place + ".trash"
        shutil.rmtree(trash, ignore_errors=True)
        if os.path.lexists(place):
            os.rename(place, trash)
            if os.path.islink(self.path):
                os.mkdir(place)
            shutil.rmtree(trash)

    def _make_python(self) -> None:
        """A Python for a host that has none that is new enough; the link to it comes last."""
        folder = self.python[: -len("/" + PYTHON_IN_FOLDER)]
        os.makedirs(folder, exist_ok=True)
        # First of all, so that what is left of a broken try is known as ours.
        write_json(os.path.join(folder, PYTHON_MARK), {"made_by": UV, "python": MADE_PYTHON})
        argv = ("python", "install", "--no-bin", "--install-dir", folder, MADE_PYTHON)
        self._uv(*argv, environ={"UV_PYTHON_DOWNLOADS": "manual"})
        made = sorted(glob.glob(os.path.join(glob.escape(folder), f"cpython-{MADE_PYTHON}.*")))[-1]
        link = os.path.join(folder, PYTHON_IN_FOLDER.split("/", 1)[0])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link + ".new")
        os.symlink(os.path.basename(made), link + ".new")
        os.replace(link + ".new", link)

    def _install(self) -> None:
        """Exactly the lock's packages, from the indexes of this machine or a folder of wheels."""
        settings, folder = pip_settings(), ""
        if self.offline:
            folder = os.path.join(self.wheels_dir, self.tags["kind"])
            if not os.path.isdir(folder):
                told = f"packages must be installed without a package index, but {folder} does not exist"
                raise VenvError(f"{self.host}: {told}", lacks_packages=True)
            environ = {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": folder}
        else:
            wants_cpu_index = "+cpu" in self.lock and answers(f"{CPU_INDEX}/torch/", settings, ANSWER_SECONDS)
            environ = for_uv(settings, CPU_INDEX if wants_cpu_index else None)
        lock = os.path.join(self.path, "requirements.lock")
        # "==2.13.0" is also met by 2.13.0+cpu, whose digests are in the other lock.
        write_whole(lock, self.lock.replace("torch==", "torch==="))
        argv = ("pip", "sync", "--quiet", "--python", self.own_python, "--require-hashes", "--no-build", lock)
        self._uv(*argv, environ=environ, wheels=folder)

    def _uv(self, *argv: str, environ: Optional[Mapping[str, str]] = None, wheels: str = "") -> None:
        """Run uv, and explain its failure."""
        given = {
            "UV_CACHE_DIR": self.cache,
            "UV_NO_PROGRESS": "1",
            "UV_HTTP_RETRIES": "2",
            "UV_PYTHON_DOWNLOADS": "never",
            "PYTHONPATH": "",
            **(environ or {}),
        }
        code, out, err = run([self.uv, *argv], given)
        if code != 0:
            raise explain(f"{err}\n{out}", self.host, self.path, wheels)


def check_room(folder: str, need: int, host: str, setting: str = "ddp_venv_dir") -> None:
    """Make a folder and check free space before anything is put there."""
    if problem := folder_problem(folder, need):
        advice = f"change that, or give another folder for the trainer's packages ({setting})"
        raise VenvError(f"{host}: {folder} {problem}; {advice}")


@contextlib.contextmanager
def building(path: str, host: str) -> Iterator[None]:
    """Lock a path that several nodes on a machine share, for one builder at a time."""
    check_room(os.path.dirname(path), 0, host)
    try:
        with locked(path + ".lock", LOCK_SECONDS):
            yield
    except Busy as why:
        raise VenvError(f"{host}: {why}") from None
