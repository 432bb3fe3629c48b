# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A virtual environment that holds exactly the pinned packages: found, built, reused, or fetched as wheels for others.

The stamp is written last and says from which requirements the environment was made; a mark is written first. An
environment with a mark was left half-built and is built again; one with neither belongs to somebody else and is used if
it has the packages, but never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

from ansible.module_utils.urls import ConnectionError as UrlError
from ansible.module_utils.urls import open_url
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import (
    Busy,
    locked,
    read_json,
    read_object,
    write_json,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text

STAMP = ".nanochat-ddp.json"
MARK = ".nanochat-ddp.building"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3", "python3.14", "python3.10")
ANSWER_SECONDS = 4
SPACE_FOR_TORCH = 1_500_000_000

Run = Callable[..., "tuple[int, str, str]"]

# Runs on any Python 3, so that one which is too old can be named with its version.
ASK_INTERPRETER = """
import importlib.util, json, os, platform, sys
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable, "machine": platform.machine(),
    "venv": has("venv"), "ensurepip": has("ensurepip"), "pip": has("pip"), "libc": list(platform.libc_ver())}))
"""

ASK_PACKAGES = """
import importlib.metadata, json, pathlib, re, sys
names = json.loads(sys.argv[1])
found = {}
for name in names:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
cuda = None
if found.get("torch"):
    where = importlib.metadata.distribution("torch").locate_file("torch/version.py")
    text = pathlib.Path(str(where)).read_text() if pathlib.Path(str(where)).exists() else ""
    match = re.search(r"^cuda(?:: [^=]+)? = (.*)$", text, re.M)
    cuda = match.group(1).strip().strip("'\\"") if match else None
print(json.dumps({"packages": found, "cuda": None if cuda in (None, "None") else cuda,
    "python": "%d.%d" % sys.version_info[:2]}))
"""


class VenvError(Exception):
    """One sentence, and a word for the reason, by which a caller can choose another way."""

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


class Interpreter(NamedTuple):
    """A Python of this host."""

    path: str
    version: tuple[int, int, int]
    machine: str
    has_venv: bool
    has_ensurepip: bool
    has_pip: bool
    libc: str

    @property
    def minor(self) -> str:
        """Such as 3.11, the part of the version that compiled packages depend on."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def tags(self) -> dict[str, str]:
        """What wheels must match."""
        kind = f"{self.minor}-{self.machine}"
        return {"python": self.minor, "machine": self.machine, "libc": self.libc, "kind": kind}


class Wish(NamedTuple):
    """What the environment should be."""

    host: str
    path: str
    requirements: tuple[str, ...]
    torch_index: str  # auto, default or a URL
    wheels: str  # a folder of wheels, or empty
    offline: bool

    def digest(self, minor: str) -> str:
        """One name for what the environment is made from."""
        text = json.dumps([sorted(self.requirements), self.torch_index, minor])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Interpreters


def find_interpreter(run: Run, find: Callable[[str], str | None], wanted: str, minimum: str, host: str) -> Interpreter:
    """The given Python, or the first suitable one of this host."""
    seen = []
    for name in [wanted] if wanted else INTERPRETERS:
        path = name if os.path.isabs(name) else find(name)
        found = _ask(run, path) if path else None
        if found is None:
            if wanted:
                seen.append(f"{wanted} is not there or does not run")
            continue
        if found.version[:2] >= _numbers(minimum):
            return found
        seen.append(f"{name} is {'.'.join(map(str, found.version))}")
    what = "; ".join(dict.fromkeys(seen)) or "no python3 was found"
    raise VenvError(
        f"{host}: the trainer needs Python {minimum} or newer, but {what}. "
        f"{install_hint('python')}, or name another one in ddp_python",
        "python",
    )


def _ask(run: Run, path: str) -> Interpreter | None:
    rc, out, _err = run([path, "-c", ASK_INTERPRETER])
    try:
        told = json.loads(out) if rc == 0 else None
    except ValueError:
        told = None
    if not told:
        return None
    version = told["version"]
    return Interpreter(
        told["executable"] or path,
        (version[0], version[1], version[2]),
        told["machine"],
        bool(told["venv"]),
        bool(told["ensurepip"]),
        bool(told["pip"]),
        "-".join(told["libc"]) if any(told["libc"]) else "",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def install_hint(what: str, minor: str = "", release: str = "/etc/os-release") -> str:
    """The command by which the owner of this host installs what is missing."""
    try:
        with open(release, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        text = ""
    words = " ".join(re.findall(r"^(?:ID|ID_LIKE)=\"?([^\"\n]*)", text, re.M)).split()
    version = minor or "3.11"
    commands = {
        "debian": {
            "python": f"apt install python{version} python{version}-venv",
            "venv": f"apt install python{version}-venv",
        },
        "fedora": {"python": f"dnf install python{version}", "venv": f"dnf install python{version}-pip"},
        "rhel": {"python": f"dnf install python{version}", "venv": f"dnf install python{version}-pip"},
        "arch": {"python": "pacman -S python", "venv": "pacman -S python-pip"},
        "suse": {
            "python": f"zypper install python{version.replace('.', '')}",
            "venv": f"zypper install python{version.replace('.', '')}-pip",
        },
        "alpine": {"python": "apk add python3", "venv": "apk add py3-pip"},
    }
    words = ["debian" if word == "ubuntu" else word for word in words]
    for word in words:
        if word in commands:
            return f"Install it there with `sudo {commands[word][what]}`"
    return f"Install Python {version} with its venv module there"


# ---------------------------------------------------------------------------------------------------------------------
# The environment


class Venv:
    """One environment on this host, and what is to be done about it."""

    def __init__(self, wish: Wish, run: Run, interpreter: Interpreter) -> None:
        self.wish = wish
        self.run = run
        self.base = interpreter
        self.warnings: list[str] = []
        self.index = ""

    @property
    def python(self) -> str:
        return os.path.join(self.wish.path, "bin", "python")

    def stamp(self) -> dict[str, Any]:
        """What the environment was made from; empty if it was never finished."""
        return read_object(os.path.join(self.wish.path, STAMP))

    def state(self) -> str:
        """absent, ready, other (finished, but of other requirements), broken, foreign or occupied."""
        path = self.wish.path
        if not os.path.lexists(path):
            return "absent"
        if not os.path.isdir(path) or (os.listdir(path) and not self._looks_like_venv()):
            return "occupied"
        stamp = self.stamp()
        if not stamp:
            is_foreign = os.path.exists(os.path.join(path, "pyvenv.cfg")) and not os.path.exists(
                os.path.join(path, MARK)
            )
            return "foreign" if is_foreign else "broken"
        if self._own_minor() != stamp.get("python"):
            return "broken"
        wanted = self.wish.digest(self.base.minor)
        return "ready" if stamp.get("digest") == wanted else "other"

    def _looks_like_venv(self) -> bool:
        return any(os.path.exists(os.path.join(self.wish.path, name)) for name in ("pyvenv.cfg", STAMP, MARK))

    def _own_minor(self) -> str:
        rc, out, _err = self.run([self.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        return out.strip() if rc == 0 else ""

    def build(self, state: str) -> None:
        """Makes or renews the environment; the stamp comes last."""
        self._refuse(state)
        parent = os.path.dirname(self.wish.path)
        check_room(parent, SPACE_FOR_TORCH if self._wants("torch") else 0, self.wish.host)
        # A finished environment of the same Python is brought up to date, anything else is made from nothing.
        fresh = state != "other" or self.stamp().get("python") != self.base.minor
        if fresh and os.path.lexists(self.wish.path):
            shutil.rmtree(self.wish.path)
        os.makedirs(self.wish.path, exist_ok=True)
        with open(os.path.join(self.wish.path, MARK), "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.wish.path, STAMP))
        pip = self._make() if fresh else self._pip()
        self._install(pip)
        self._write_stamp()
        os.unlink(os.path.join(self.wish.path, MARK))

    def _refuse(self, state: str) -> None:
        if state == "occupied":
            raise VenvError(
                f"{self.wish.host}: {self.wish.path} is there and is no virtual environment, so it is left alone; "
                "give another folder (ddp_venv_dir)",
                "occupied",
            )
        if state == "foreign":
            lacking = ", ".join(self.lacking(self.packages()["packages"]))
            raise VenvError(
                f"{self.wish.host}: {self.wish.path} is a virtual environment that was not made by this collection, so it "
                f"is left alone, but it lacks {lacking}; install that there, or give another folder (ddp_venv_dir)",
                "occupied",
            )

    def _wants(self, name: str) -> bool:
        return any(name_of(one) == name for one in self.wish.requirements)

    def _make(self) -> list[str]:
        """Creates the bare environment; returns how pip is called for it."""
        if not self.base.has_venv:
            raise self._no_pip()
        bare = not self.base.has_ensurepip
        pip = self._pip() if not bare else self._foreign_pip()
        argv = [self.base.path, "-m", "venv", *(["--without-pip"] if bare else []), self.wish.path]
        rc, out, err = self.run(argv)
        if rc != 0:
            raise VenvError(
                f"{self.wish.host}: {self.base.path} could not make a virtual environment in {self.wish.path}: "
                f"{last_line(err or out)}",
                "venv",
            )
        return pip

    def _pip(self) -> list[str]:
        return [self.python, "-m", "pip"]

    def _foreign_pip(self) -> list[str]:
        """Without ensurepip (Debian keeps it in a package of its own) a pip from elsewhere fills the environment."""
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
        """Wheels of pip itself: a wheel can be run as it is."""
        try:
            names = os.listdir(self.wish.wheels) if self.wish.wheels else []
        except OSError:
            names = []
        return sorted(os.path.join(self.wish.wheels, name) for name in names if re.match(r"pip-\d.*\.whl$", name))

    def _no_pip(self) -> VenvError:
        return VenvError(
            f"{self.wish.host}: {self.base.path} (Python {self.base.minor}) comes without ensurepip, so no virtual "
            f"environment can be made with it. {install_hint('venv', self.base.minor)}, then run this again",
            "venv",
        )

    def _install(self, pip: list[str]) -> None:
        """From the package index, or from wheels where there is no way to one."""
        argv = [*pip, "install", "--no-input", "--disable-pip-version-check", "--prefer-binary", "--retries", "2"]
        argv += self._sources()
        rc, out, err = self.run([*argv, *self.wish.requirements])
        if rc != 0:
            raise explain(self.wish, self.base, out + "\n" + err)

    def _sources(self) -> list[str]:
        if self.wish.offline:
            if not self.wish.wheels or not os.path.isdir(self.wish.wheels):
                raise VenvError(
                    f"{self.wish.host}: packages are to be installed without a package index, but the folder of wheels "
                    f"{self.wish.wheels or '(none given)'} is not there",
                    "network",
                )
            self.index = self.wish.wheels
            return ["--no-index", "--find-links", self.wish.wheels]
        self.index, argv = choose_index(self.wish, self.warnings) if self._wants("torch") else ("default", [])
        return argv

    def packages(self) -> dict[str, Any]:
        """The installed versions of what was required, and what torch was built for."""
        names = [name_of(one) for one in self.wish.requirements]
        rc, out, err = self.run([self.python, "-I", "-c", ASK_PACKAGES, json.dumps(names)])
        try:
            return dict(json.loads(out))
        except ValueError:
            raise VenvError(f"{self.wish.host}: {self.python} does not run ({rc}): {last_line(err or out)}") from None

    def lacking(self, packages: dict[str, Any]) -> list[str]:
        """The requirements that the installed versions do not meet."""
        return [one for one in self.wish.requirements if not meets(one, packages.get(name_of(one)))]

    def _write_stamp(self) -> None:
        found = self.packages()
        lacking = self.lacking(found["packages"])
        if lacking:
            raise VenvError(f"{self.wish.host}: pip reported success, but {self.wish.path} lacks {', '.join(lacking)}")
        stamp = {
            "digest": self.wish.digest(self.base.minor),
            "requirements": sorted(self.wish.requirements),
            "index": self.index,
            **found,
        }
        write_json(os.path.join(self.wish.path, STAMP), stamp)


def name_of(requirement: str) -> str:
    """The package's name as the metadata spells it."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return re.sub(r"[-_.]+", "-", found.group(1)).lower() if found else requirement


def meets(requirement: str, version: str | None) -> bool:
    """Whether an installed version is the pinned one; 2.13.0+cpu is 2.13.0, since builds are told apart elsewhere."""
    if version is None:
        return False
    pinned = re.match(r"[^=<>!~;@\[]+(?:\[[^\]]*\])?\s*==\s*([^\s;,*]+)\s*(?:;.*)?$", requirement)
    if not pinned:
        return True
    wanted = pinned.group(1)
    return wanted == version or ("+" not in wanted and wanted == version.split("+")[0])


# ---------------------------------------------------------------------------------------------------------------------
# Indexes and pip's words


def choose_index(wish: Wish, warnings: list[str]) -> tuple[str, list[str]]:
    """PyTorch's own index beside the user's if it answers: its builds (+cpu) outrank those of the default index."""
    url = CPU_INDEX if wish.torch_index == "auto" else wish.torch_index
    if url in ("", "default") or os.environ.get("PIP_NO_INDEX"):
        return "default", []
    if answers(url):
        return url, ["--extra-index-url", url]
    warnings.append(
        f"{wish.host}: {url} does not answer within {ANSWER_SECONDS} s, so torch comes from the default index"
        + (", whose build for x86-64 may bring CUDA along" if wish.torch_index == "auto" else "")
    )
    return "default", []


def answers(url: str) -> bool:
    """Whether an index says anything about torch, asked the way pip would (proxies, certificates)."""
    if url.startswith("file://"):
        return os.path.isdir(urllib.request.url2pathname(urllib.parse.urlparse(url).path))
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    try:
        page = url.rstrip("/") + "/torch/"
        ca_path = bundle if bundle and os.path.isfile(bundle) else None
        with open_url(page, timeout=ANSWER_SECONDS, ca_path=ca_path, http_agent="nanochat.ddp") as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException, UrlError):
        return False


NETWORK = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|timed out|"
    r"Network is unreachable|No route to host|Connection refused|Max retries exceeded|ConnectTimeout|ProxyError|"
    r"Connection aborted|Connection reset|NewConnectionError|Cannot connect to proxy",
    re.I,
)
NO_MATCH = re.compile(r"No matching distribution found for ([^\s(]+)")
NEEDS_PYTHON = re.compile(r"(\S+) Requires-Python (>=[\d.]+)|requires a different Python: \S+ not in '([^']+)'")


def explain(wish: Wish, base: Interpreter, text: str) -> VenvError:
    """What pip said, as one sentence with what to do."""
    who = f"{wish.host}: the packages could not be installed in {wish.path}"
    if re.search(r"No space left on device|Disk quota exceeded", text):
        return VenvError(
            f"{who}: the disk is full ({free_text(wish.path)}); make room there (pip also needs some in TMPDIR), or "
            "give another folder (ddp_venv_dir)",
            "disk",
        )
    if re.search("CERTIFICATE_VERIFY_FAILED|certificate verify failed", text, re.I):
        return VenvError(
            f"{who}: the package index's certificate is not trusted there; name the right CA bundle in that user's "
            "pip.conf (cert = ...) or set the clock right",
            "network",
        )
    missing = NO_MATCH.search(text)
    if wish.offline:
        lacking = missing.group(1) if missing else last_line(text)
        return VenvError(
            f"{who}: the wheels in {wish.wheels} do not fit Python {base.minor} on {base.machine}: {lacking}; wheels must "
            "be fetched for the same Python and architecture",
            "wheels",
        )
    if NETWORK.search(text):
        return VenvError(
            f"{who}: no package index answers there ({last_line(text)}); connect the host, name an index it can reach in "
            "that user's pip.conf, or set ddp_trainer_offline so that another host fetches the packages for it",
            "network",
        )
    if missing:
        old = f", which Python {base.minor} may be too old for" if NEEDS_PYTHON.search(text) else ""
        return VenvError(f"{who}: no package index has {missing.group(1)} for Python {base.minor}{old}", "requirement")
    return VenvError(f"{who}: pip said: {last_line(text)}", "other")


def last_line(text: str) -> str:
    """The line that says most: pip's last ERROR, or simply the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    chosen = (errors or lines or ["nothing"])[-1]
    return re.sub(r"^(ERROR|error):\s*", "", chosen)[:400].rstrip(".")


def check_room(folder: str, need: int, host: str) -> None:
    """Makes the parent folder and looks whether the packages will fit, before anything is fetched."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as why:
        raise VenvError(f"{host}: {folder} cannot be made: {why.strerror}; give another folder (ddp_venv_dir)") from why
    if not os.access(folder, os.W_OK | os.X_OK):
        raise VenvError(
            f"{host}: {folder} cannot be written by this user (id {os.getuid()}); give it to that user, or give another "
            "folder (ddp_venv_dir)",
            "folder",
        )
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < need:
        raise VenvError(
            f"{host}: {folder} has {bytes_text(free)} free, but the trainer's packages need about {bytes_text(need)}; "
            "make room there, or give another folder (ddp_venv_dir)",
            "disk",
        )


def free_text(path: str) -> str:
    try:
        found = os.statvfs(path)
    except OSError:
        return "free space unknown"
    return f"{bytes_text(found.f_bavail * found.f_frsize)} free"


# ---------------------------------------------------------------------------------------------------------------------
# Wheels for hosts that reach no index


def platforms(machine: str) -> list[str]:
    """Names of the platforms whose wheels run on a Linux machine with a glibc of the last ten years, newest first."""
    return [f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)] + [f"manylinux2014_{machine}"]


def wheels_ready(wish: Wish, target: dict[str, str]) -> bool:
    """Whether the folder of wheels was filled for these requirements and this target."""
    return bool(read_json(os.path.join(wish.wheels, ".wheels.json")) == wheels_stamp(wish, target))


def wheels_stamp(wish: Wish, target: dict[str, str]) -> dict[str, Any]:
    """What a folder of wheels was filled for."""
    return {"requirements": sorted(wish.requirements), "target": target, "index": wish.torch_index}


def fetch_wheels(wish: Wish, run: Run, base: Interpreter, pip: list[str], target: dict[str, str]) -> None:
    """Fills the folder of wheels for hosts with the target's Python and architecture."""
    fresh = wish.wheels.rstrip("/") + ".part"
    shutil.rmtree(fresh, ignore_errors=True)
    check_room(fresh, SPACE_FOR_TORCH // 3, wish.host)
    argv = [*pip, "download", "--no-input", "--disable-pip-version-check", "--retries", "2", "--only-binary=:all:"]
    argv += ["--dest", fresh, *choose_index(wish, [])[1]]
    if [target["python"], target["machine"]] != [base.minor, base.machine]:
        tag = "cp" + target["python"].replace(".", "")
        argv += ["--python-version", target["python"], "--implementation", "cp"]
        argv += [part for abi in (tag, "abi3", "none") for part in ("--abi", abi)]
        argv += [part for name in platforms(target["machine"]) for part in ("--platform", name)]
    # pip itself comes along for hosts whose Python has no ensurepip.
    rc, out, err = run([*argv, *wish.requirements, "pip"])
    if rc != 0:
        raise explain(wish._replace(path=wish.wheels), base, out + "\n" + err)
    write_json(os.path.join(fresh, ".wheels.json"), wheels_stamp(wish, target))
    shutil.rmtree(wish.wheels, ignore_errors=True)
    os.replace(fresh, wish.wheels)


@contextlib.contextmanager
def building(path: str, host: str, patience: float) -> Iterator[None]:
    """One builder at a time for a path that several nodes of a machine share."""
    check_room(os.path.dirname(path), 0, host)
    try:
        with locked(path + ".lock", patience):
            yield
    except Busy:
        raise VenvError(
            f"{host}: another process has been building {path} for {patience:.0f} s (it holds {path}.lock)"
        ) from None
