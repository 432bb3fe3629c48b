# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trainer's virtual environment on a host, made by uv from a lock: a list of packages with the digests of their wheels.

A mark is written first, and last a stamp with the lock's digest. An environment with a mark but no stamp is half-built, and is
rebuilt; one with neither belongs to somebody else: it is used if it has the packages, but never changed.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Optional, TypedDict, cast

from .._contract.document import Document
from .._contract.run_folder import PYTHON_IN_FOLDER, PYTHON_MARK
from .._contract.versions import MADE_PYTHON, UV, VENV_BYTES
from .._kit.bare import run
from .._kit.files import Busy, free_bytes, locked, read_object, write_json, write_whole
from .._kit.words import bytes_text
from .files import users_of
from .pip_settings import for_uv, pip_settings
from .uv_errors import ANSWER_SECONDS, CPU_INDEX, VenvError, VenvSpec, explain, last_line

STAMP = ".nanochat-ddp.json"
MARK = ".nanochat-ddp.building"
OLDEST_PYTHON = (3, 10)

ASK_PYTHON = "import json, platform, sys; print(json.dumps([*sys.version_info[:2], platform.machine()]))"
ASK_PACKAGES = """
import csv, importlib.metadata, json, os, pathlib, re, sys
names = json.loads(sys.argv[1])
found = {}
damaged = []

def lost(one):
    # Compiled files come and go; all else that was installed is still there, or the package does not work. PyTorch has ten thousand
    # files, so folders are listed and no file is asked for.
    base, there = str(one.locate_file("")), {}
    for row in csv.reader((one.read_text("RECORD") or "").splitlines()):
        folder, slash, name = row[0].rpartition("/")
        if folder not in there:
            path = os.path.join(base, folder + slash)
            there[folder] = set(os.listdir(path)) if os.path.isdir(path) else set()
        if name not in there[folder] and not name.endswith(".pyc"):
            yield row[0]

for name in names:
    try:
        one = importlib.metadata.distribution(name)
        found[name] = one.version
        damaged += list(lost(one))[:1]
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
cuda = None
if found.get("torch"):
    where = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    text = pathlib.Path(str(where)).read_text() if pathlib.Path(str(where)).exists() else ""
    match = re.search(r"^cuda(?:: [^=]+)? = (.*)$", text, re.M)
    cuda = match.group(1).strip().strip("'\\"") if match else None
print(json.dumps({"packages": found, "cuda": None if cuda in (None, "None") else cuda, "damaged": damaged,
    "python": "%d.%d" % sys.version_info[:2]}))
"""


class Installed(TypedDict):
    """Installed versions of the pinned packages, torch's build, missing files, and the Python."""

    packages: dict[str, Optional[str]]
    cuda: Optional[str]
    damaged: list[str]
    python: str


def uv_beside(path: str) -> str:
    """Where uv is kept for an environment: beside it, for all that lie there."""
    return os.path.join(os.path.dirname(path.rstrip("/")), UV.replace("==", "-"))


class Venv:
    """One environment on this host."""

    def __init__(self, wanted: VenvSpec) -> None:
        self.wanted = wanted
        self.warnings: list[str] = []
        self.index = ""

    @property
    def python(self) -> str:
        return os.path.join(self.wanted.path, "bin", "python")

    @property
    def minor(self) -> str:
        """For example 3.11, the part of the version that compiled packages depend on."""
        return self._base_python[0]

    @property
    def tags(self) -> dict[str, str]:
        """The tags that wheels must match, and the name of their folder."""
        return {"python": self.minor, "machine": self._base_python[1], "kind": "-".join(self._base_python)}

    @property
    def makes_python(self) -> bool:
        """Whether the interpreter is one that uv installs, and is not there yet."""
        return self.wanted.python.endswith("/" + PYTHON_IN_FOLDER) and not os.path.exists(self.wanted.python)

    @functools.cached_property
    def _base_python(self) -> tuple[str, str]:
        """Version and machine of the interpreter that the environment is made with."""
        if self.makes_python:
            return MADE_PYTHON, os.uname().machine
        dummy, out, err = run([self.wanted.python, "-I", "-c", ASK_PYTHON])
        try:
            major, minor, machine = json.loads(out)
        except (ValueError, TypeError):
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.python} does not run as a Python ({last_line(err or out)}); set ddp_python to "
                "one, or leave it empty",
                "python",
            ) from None
        if (major, minor) < OLDEST_PYTHON:
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.python} is Python {major}.{minor}, and the trainer needs 3.10 or newer; set "
                "ddp_python to such a one, or leave it empty",
                "python",
            )
        return f"{major}.{minor}", str(machine)

    def stamp(self) -> Document:
        """The stamp of the environment; empty if it was never finished."""
        return read_object(os.path.join(self.wanted.path, STAMP))

    def place(self) -> str:
        """State of the folder, without running anything: absent, occupied, foreign, broken (half-built) or made."""
        path = self.wanted.path
        if not os.path.lexists(path):
            return "absent"
        if not os.path.isdir(path) or (os.listdir(path) and not self._looks_like_venv()):
            return "occupied"
        if self.stamp():
            return "made"
        is_foreign = os.path.exists(os.path.join(path, "pyvenv.cfg")) and not os.path.exists(os.path.join(path, MARK))
        return "foreign" if is_foreign else "broken"

    def look(self) -> tuple[str, Installed | None]:
        """The state (absent, ready, other, broken, foreign or occupied), and the content of a readable environment.

        ready: usable as it is, ours or somebody else's with the packages.
        other: finished, but from another lock, or a package was removed or replaced since.
        """
        place = self.place()
        if place == "foreign":
            found = self.packages()
            return "foreign" if self.lacking(found["packages"]) else "ready", found
        if place != "made":
            return place, None
        try:
            found = self.packages()
        except VenvError:
            return "broken", None
        state = self._as_stamped(found)
        return state, found if state == "ready" else None

    def _as_stamped(self, found: Installed) -> str:
        stamp = self.stamp()
        if found.get("python") != stamp.get("python") or found.get("python") != self.minor:
            return "broken"
        if stamp.get("digest") != self.wanted.digest:
            return "other"
        if found.get("damaged"):
            return "broken"
        return "other" if self.lacking(found["packages"]) else "ready"

    def _looks_like_venv(self) -> bool:
        return any(os.path.exists(os.path.join(self.wanted.path, name)) for name in ("pyvenv.cfg", STAMP, MARK))

    def build(self, state: str) -> None:
        """Make or update the environment; the stamp comes last."""
        self._refuse(state)
        self.refuse_in_use()
        check_room(
            os.path.dirname(self.wanted.path), VENV_BYTES if "torch" in self.wanted.pins else 0, self.wanted.host
        )
        # Update a finished environment of the same Python; rebuild any other.
        fresh = state != "other"
        if fresh:
            self.discard()
        os.makedirs(self.wanted.path, exist_ok=True)
        write_whole(os.path.join(self.wanted.path, MARK), f"{os.getpid()}\n")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.wanted.path, STAMP))
        if self.makes_python:
            self._make_python()
        if fresh:
            self._uv("venv", "--quiet", "--allow-existing", "--python", self.wanted.python, self.wanted.path)
        self._install()
        self._write_stamp()
        os.unlink(os.path.join(self.wanted.path, MARK))
        # Kept after a broken attempt only, so that the next one continues from there.
        shutil.rmtree(self._cache(), ignore_errors=True)

    def discard(self) -> None:
        """Remove the environment, renaming it first: a half-removed one must not look like somebody else's."""
        # A link to it stays, so that it is rebuilt on the disk where its owner wants it.
        place = os.path.realpath(self.wanted.path)
        trash = place + ".trash"
        shutil.rmtree(trash, ignore_errors=True)
        if os.path.lexists(place):
            os.rename(place, trash)
            if os.path.islink(self.wanted.path):
                os.mkdir(place)
            shutil.rmtree(trash)

    def remove(self) -> None:
        """Remove the environment with all that was kept beside it."""
        self.refuse_in_use()
        self.discard()
        for path in (self.wanted.path + ".lock", uv_beside(self.wanted.path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        shutil.rmtree(self._cache(), ignore_errors=True)

    def refuse_in_use(self) -> None:
        """Refuse to replace files that a training uses."""
        for user in users_of(self.wanted.path):
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.path} must be changed, but a run uses it (process {user.pid} of "
                f"{user.user}: {user.command[:80]}); stop it first with `ansible-playbook nanochat.ddp.stop`",
                "in-use",
            )

    def _refuse(self, state: str) -> None:
        if state == "occupied":
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.path} exists and is not a virtual environment, so it was not touched; "
                "give another folder (ddp_venv_dir)",
                "occupied",
            )
        if state == "foreign":
            lacking = ", ".join(self.lacking(self.packages()["packages"]))
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.path} is a virtual environment that this collection did not create, so it "
                f"is not changed, but it lacks {lacking}; install that there, or give another folder (ddp_venv_dir)",
                "occupied",
            )

    def _cache(self) -> str:
        # On the environment's own disk, so that files are linked and not copied.
        return self.wanted.path.rstrip("/") + ".cache"

    def _uv(self, *argv: str, environ: Optional[Mapping[str, str]] = None) -> None:
        """Run uv, and explain its failure."""
        given = {
            "UV_CACHE_DIR": self._cache(),
            "UV_NO_PROGRESS": "1",
            "UV_HTTP_RETRIES": "2",
            "UV_PYTHON_DOWNLOADS": "never",
            "PYTHONPATH": "",
            **(environ or {}),
        }
        rc, out, err = run([self.wanted.uv, *argv], given)
        if rc != 0:
            raise explain(f"{err}\n{out}", self.wanted, self.tags["kind"], self.index)

    def _make_python(self) -> None:
        """A Python for a host that has none that is new enough; the link to it comes last."""
        folder = self.wanted.python[: -len("/" + PYTHON_IN_FOLDER)]
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
        lock = os.path.join(self.wanted.path, "requirements.lock")
        # "==2.13.0" is also met by 2.13.0+cpu, whose digests are in the other lock.
        write_whole(lock, self.wanted.lock.replace("torch==", "torch==="))
        argv = ("pip", "sync", "--quiet", "--python", self.python, "--require-hashes", "--no-build", lock)
        self._uv(*argv, environ=self._sources())

    def _sources(self) -> dict[str, str]:
        settings = pip_settings()
        if self.wanted.offline:
            handed_on = os.path.join(self.wanted.wheels, self.tags["kind"])
            self.index = handed_on if os.path.isdir(handed_on) else self.wanted.wheels
            if not os.path.isdir(self.index):
                raise VenvError(
                    f"{self.wanted.host}: packages must be installed without a package index, but the wheel folder "
                    f"{self.index or '(none given)'} does not exist",
                    "network",
                )
            return {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": self.index}
        self.index = "default"
        if self.wanted.torch_index == "default" or "torch" not in self.wanted.pins:
            return for_uv(settings)
        url = CPU_INDEX if self.wanted.torch_index == "auto" else self.wanted.torch_index
        if answers(url, settings):
            self.index = url
            return for_uv(settings, url)
        if self.wanted.torch_index != "auto":
            self.warnings.append(f"{self.wanted.host}: {url} did not answer within {ANSWER_SECONDS} s")
        return for_uv(settings)

    def packages(self) -> Installed:
        """Installed versions of the pinned packages, and torch's build."""
        rc, out, err = run([self.python, "-I", "-c", ASK_PACKAGES, json.dumps(sorted(self.wanted.pins))])
        try:
            told = json.loads(out)
        except ValueError:
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("packages"), dict):
            raise VenvError(f"{self.wanted.host}: {self.python} does not run ({rc}): {last_line(err or out)}")
        return cast(Installed, told)

    def lacking(self, packages: Mapping[str, Optional[str]]) -> list[str]:
        """Pinned packages whose installed version the lock does not name; builds (+cpu) are compared elsewhere."""
        return [
            f"{name}=={versions[-1]}"
            for name, versions in sorted(self.wanted.pins.items())
            if str(packages.get(name)).partition("+")[0] not in versions
        ]

    def _write_stamp(self) -> None:
        found = self.packages()
        lacking = self.lacking(found["packages"])
        if lacking:
            raise VenvError(
                f"{self.wanted.host}: uv reported success, but {self.wanted.path} lacks {', '.join(lacking)}"
            )
        stamp = {"digest": self.wanted.digest, "index": self.index, **found}
        write_json(os.path.join(self.wanted.path, STAMP), stamp)


def answers(url: str, settings: Mapping[str, str]) -> bool:
    """Whether an index lists torch; asked as pip would (proxy, certificate)."""
    # Imported here because inspecting an environment needs none of it, and takes less time than loading it.
    import http.client
    import ssl
    import urllib.request

    if url.startswith("file://"):
        return os.path.isdir(os.path.join(urllib.request.url2pathname(url[len("file://") :]), "torch"))
    proxy = settings.get("proxy")
    handlers: list[urllib.request.BaseHandler] = (
        [urllib.request.ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    )
    try:
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.get("cert"))))
        with urllib.request.build_opener(*handlers).open(
            f"{url.rstrip('/')}/torch/", timeout=ANSWER_SECONDS
        ) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def check_room(folder: str, need: int, host: str) -> None:
    """Make the parent folder and check free space before downloading."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as why:
        raise VenvError(
            f"{host}: {folder} cannot be created: {why.strerror}; give another folder (ddp_venv_dir)"
        ) from why
    if not os.access(folder, os.W_OK | os.X_OK):
        raise VenvError(
            f"{host}: {folder} cannot be written by this user (id {os.getuid()}); give it to that user, or give another "
            "folder (ddp_venv_dir)",
            "folder",
        )
    free = free_bytes(folder)
    if free < need:
        raise VenvError(
            f"{host}: {folder} has {bytes_text(free)} free, but the trainer's packages need about {bytes_text(need)}; "
            "make room there, or give another folder (ddp_venv_dir)",
            "disk",
        )


@contextlib.contextmanager
def building(path: str, host: str, patience: float) -> Iterator[None]:
    """Lock a path that several nodes on a machine share, for one builder at a time."""
    check_room(os.path.dirname(path), 0, host)
    try:
        with locked(path + ".lock", patience):
            yield
    except Busy:
        raise VenvError(
            f"{host}: another process has been building {path} for {patience:.0f} s (it holds {path}.lock)"
        ) from None
