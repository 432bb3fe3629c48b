# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The virtual environment with exactly the pinned packages: find, build, reuse it, or fetch wheels for other hosts.

A mark is written first, and last a stamp with the requirements. An environment with a mark but no stamp is half-built, and is
rebuilt; one with neither belongs to somebody else: it is used if it has the packages, but never changed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Mapping, TypedDict, cast

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import Document
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import VENV_BYTES
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import Busy, locked, read_object, write_json
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import (
    HostInterpreter,
    Run,
    VenvError,
    install_hint,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.packages import (
    VenvSpec,
    applicable,
    check_room,
    choose_index,
    explain,
    last_line,
    meets,
    name_of,
)

STAMP = ".nanochat-ddp.json"
MARK = ".nanochat-ddp.building"

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
    """Installed versions of the requirements, torch's build, missing files, and the Python."""

    packages: dict[str, str | None]
    cuda: str | None
    damaged: list[str]
    python: str


class Venv:
    """One environment on this host."""

    def __init__(self, wanted: VenvSpec, run: Run, interpreter: HostInterpreter) -> None:
        # Packages received from other hosts are in a folder for each Python and architecture.
        handed_on = os.path.join(wanted.wheels, interpreter.tags["kind"]) if wanted.offline else ""
        # Where a link leads to another disk, the environment is made there again.
        self.given = wanted.path
        self.wanted = wanted._replace(
            path=os.path.realpath(wanted.path),
            wheels=handed_on if os.path.isdir(handed_on) else wanted.wheels,
            requirements=applicable(wanted.requirements, interpreter.minor),
        )
        self.run = run
        self.base = interpreter
        self.warnings: list[str] = []
        self.index = ""

    @property
    def python(self) -> str:
        return os.path.join(self.wanted.path, "bin", "python")

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
        other: finished, but for other requirements, or a package was removed or replaced since.
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
        if found.get("python") != stamp.get("python"):
            return "broken"
        if stamp.get("digest") != self.wanted.digest(self.base.minor):
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
        parent = os.path.dirname(self.wanted.path)
        check_room(parent, VENV_BYTES if self._wants("torch") else 0, self.wanted.host)
        # Update a finished environment of the same Python; rebuild any other.
        fresh = state != "other" or self.stamp().get("python") != self.base.minor or not self._has_pip()
        if fresh:
            self.discard()
        os.makedirs(self.wanted.path, exist_ok=True)
        with open(os.path.join(self.wanted.path, MARK), "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.wanted.path, STAMP))
        pip = self._make() if fresh else self._pip()
        self._install(pip)
        self._write_stamp()
        os.unlink(os.path.join(self.wanted.path, MARK))

    def _has_pip(self) -> bool:
        return self.run([*self._pip(), "--version"])[0] == 0

    def discard(self) -> None:
        """Remove the environment, renaming it first: a half-removed one must not look like somebody else's."""
        trash = self.wanted.path + ".trash"
        shutil.rmtree(trash, ignore_errors=True)
        if not os.path.lexists(self.wanted.path):
            return
        try:
            os.rename(self.wanted.path, trash)
        except OSError:  # it is a mount point
            with open(os.path.join(self.wanted.path, MARK), "w", encoding="utf-8"):
                pass
            for name in sorted(os.listdir(self.wanted.path), key=lambda name: name in (MARK, STAMP)):
                one = os.path.join(self.wanted.path, name)
                shutil.rmtree(one) if os.path.isdir(one) and not os.path.islink(one) else os.unlink(one)
            return
        shutil.rmtree(trash)

    def refuse_in_use(self) -> None:
        """Refuse to replace files that a training uses."""
        inside = tuple(os.path.join(path, "bin", "") for path in (self.given, self.wanted.path))
        users = [
            one for one in processes.processes().values() if one.marker and "".join(one.argv[:1]).startswith(inside)
        ]
        if users:
            raise VenvError(
                f"{self.wanted.host}: {self.wanted.path} must be changed, but a run uses it (process {users[0].pid} of "
                f"{users[0].user}: {users[0].command[:80]}); stop it first with `ansible-playbook nanochat.ddp.stop`",
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

    def _wants(self, name: str) -> bool:
        return any(name_of(one) == name for one in self.wanted.requirements)

    def _make(self) -> list[str]:
        """Create the bare environment; returns its pip command."""
        if not self.base.has_venv:
            raise self._no_pip()
        bare = not self.base.has_ensurepip
        pip = self._pip() if not bare else self._foreign_pip()
        argv = [self.base.path, "-m", "venv", *(["--without-pip"] if bare else []), self.wanted.path]
        rc, out, err = self.run(argv)
        if rc != 0:
            raise VenvError(
                f"{self.wanted.host}: {self.base.path} could not create a virtual environment in {self.wanted.path}: "
                f"{last_line(err or out)}",
                "venv",
            )
        return pip

    def _pip(self) -> list[str]:
        return [self.python, "-m", "pip"]

    def _foreign_pip(self) -> list[str]:
        """A pip from elsewhere to fill the environment, because ensurepip is missing (Debian packages it separately)."""
        wheels = self._pip_wheels()
        if wheels:
            return [self.base.path, os.path.join(wheels[-1], "pip"), "--python", self.python]
        if self.base.has_pip:
            rc, out, _err = self.run([self.base.path, "-m", "pip", "--version"])
            found = re.match(r"pip (\d+)\.(\d+)", out) if rc == 0 else None
            if found and (int(found.group(1)), int(found.group(2))) >= (22, 3):
                return [self.base.path, "-m", "pip", "--python", self.python]
        raise self._no_pip()

    def _pip_wheels(self) -> list[str]:
        """Wheels of pip itself, which can be run directly."""
        folder = self.wanted.wheels
        return sorted(glob.glob(os.path.join(glob.escape(folder), "pip-[0-9]*.whl"))) if folder else []

    def _no_pip(self) -> VenvError:
        return VenvError(
            f"{self.wanted.host}: {self.base.path} (Python {self.base.minor}) lacks ensurepip, so no virtual "
            f"environment can be created with it. {install_hint('venv', self.base.minor)}, then run this again",
            "venv",
        )

    def _install(self, pip: list[str]) -> None:
        """Install from the package index, or from wheels if none is reachable."""
        argv = [*pip, "install", "--no-input", "--disable-pip-version-check", "--prefer-binary", "--retries", "2"]
        argv += self._sources(pip)
        rc, out, err = self.run([*argv, *self.wanted.requirements])
        if rc != 0:
            raise explain(self.wanted, self.base, out + "\n" + err)

    def _sources(self, pip: list[str]) -> list[str]:
        if self.wanted.offline:
            if not self.wanted.wheels or not os.path.isdir(self.wanted.wheels):
                raise VenvError(
                    f"{self.wanted.host}: packages must be installed without a package index, but the wheel folder "
                    f"{self.wanted.wheels or '(none given)'} does not exist",
                    "network",
                )
            self.index = self.wanted.wheels
            return ["--no-index", "--find-links", self.wanted.wheels]
        if not self._wants("torch"):
            self.index = "default"
            return []
        self.index, argv = choose_index(self.wanted, self.run, pip, self.warnings)
        return argv

    def packages(self) -> Installed:
        """Installed versions of the requirements, and torch's build."""
        names = [name_of(one) for one in self.wanted.requirements]
        rc, out, err = self.run([self.python, "-I", "-c", ASK_PACKAGES, json.dumps(names)])
        try:
            told = json.loads(out)
        except ValueError:
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("packages"), dict):
            raise VenvError(f"{self.wanted.host}: {self.python} does not run ({rc}): {last_line(err or out)}")
        return cast(Installed, told)

    def lacking(self, packages: Mapping[str, str | None]) -> list[str]:
        """Requirements that the installed versions do not meet."""
        return [one for one in self.wanted.requirements if not meets(one, packages.get(name_of(one)))]

    def _write_stamp(self) -> None:
        found = self.packages()
        lacking = self.lacking(found["packages"])
        if lacking:
            raise VenvError(
                f"{self.wanted.host}: pip reported success, but {self.wanted.path} lacks {', '.join(lacking)}"
            )
        stamp = {
            "digest": self.wanted.digest(self.base.minor),
            "requirements": sorted(self.wanted.requirements),
            "index": self.index,
            "packages": found.get("packages"),
            "cuda": found.get("cuda"),
            "python": found.get("python"),
        }
        write_json(os.path.join(self.wanted.path, STAMP), stamp)


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
