# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources of packages: requirements, indexes, wheels for hosts without an index, and pip's errors explained."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import VENV_BYTES
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import (
    free_bytes,
    read_json,
    read_text,
    write_json,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.words import bytes_text
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import (
    HostInterpreter,
    Run,
    VenvError,
    version_numbers,
)

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 4
LONGEST_PAGE = 64 * 1024 * 1024
CUDA_DOWNLOAD = 3_000_000_000
CUDA_DISK = 8_000_000_000


class VenvSpec(NamedTuple):
    """The wanted environment."""

    host: str
    path: str
    requirements: tuple[str, ...]
    torch_index: str  # auto, default or a URL
    wheels: str  # a folder of wheels, or empty
    offline: bool

    def digest(self, minor: str) -> str:
        """Identifies everything the environment is made from."""
        text = json.dumps([sorted(self.requirements), self.torch_index, minor])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of(requirement: str) -> str:
    """The package's name as the metadata spells it."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return re.sub(r"[-_.]+", "-", found.group(1)).lower() if found else requirement


def meets(requirement: str, version: str | None) -> bool:
    """Whether an installed version matches the pinned one; ignores +cpu, because builds are compared elsewhere."""
    if version is None:
        return False
    pinned = re.match(r"[^=<>!~;@\[]+(?:\[[^\]]*\])?\s*==\s*([^\s;,*]+)\s*(?:;.*)?$", requirement)
    if not pinned:
        return True
    pin = pinned.group(1)
    return pin == version or ("+" not in pin and pin == version.split("+")[0])


def applicable(requirements: Sequence[str], minor: str) -> tuple[str, ...]:
    """Requirements that apply to a Python version; only the marker `python_version` is evaluated, the rest is left to pip."""
    found = []
    for one in requirements:
        marker = re.match(r"(.*?)\s*;\s*python_version\s*(<|>=)\s*['\"](\d+)\.(\d+)['\"]\s*$", one)
        if not marker:
            found.append(one)
        elif (version_numbers(minor) >= (int(marker.group(3)), int(marker.group(4)))) == (marker.group(2) == ">="):
            found.append(marker.group(1))
    return tuple(found)


def choose_index(
    wanted: VenvSpec, run: Run, pip: Sequence[str], warnings: list[str], target: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Add PyTorch's own index if it answers: its builds (+cpu) outrank those of the default index.

    `target` are pip's options for a different Python or architecture.
    """
    url = CPU_INDEX if wanted.torch_index == "auto" else wanted.torch_index
    if url in ("", "default") or os.environ.get("PIP_NO_INDEX"):
        return "default", []
    if answers(url, pip_settings(run, pip)):
        return url, ["--extra-index-url", url]
    if wanted.torch_index == "auto":
        refuse_cuda(wanted, run, pip, target)
    else:
        warnings.append(
            f"{wanted.host}: {url} did not answer within {ANSWER_SECONDS} s, so torch comes from the default index"
        )
    return "default", []


def refuse_cuda(wanted: VenvSpec, run: Run, pip: Sequence[str], target: Sequence[str]) -> None:
    """Refuse a CUDA build, which is several times as large and useless on a CPU."""
    torch = [one for one in wanted.requirements if name_of(one) == "torch"]
    asked = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--no-input", "--quiet", "--report", "-"]
    # pip requires --target with such options, though a dry run does not touch it.
    elsewhere = ["--only-binary=:all:", *target, "--target", wanted.path + ".none"] if target else []
    rc, out, err = run([*pip, *asked, *elsewhere, *torch])
    try:
        installs = json.loads(out)["install"] if rc == 0 else []
    except (ValueError, KeyError, TypeError):
        installs = []
    needs = [str(one) for part in installs for one in part["metadata"].get("requires_dist") or []]
    if installs and not any(re.match(r"(nvidia|cuda)-", one) for one in needs):
        return
    why = "which has only a CUDA build" if installs else last_line(err or out)
    raise VenvError(
        f"{wanted.host}: no CPU build of torch is available there: {CPU_INDEX} did not answer within {ANSWER_SECONDS} s, and the "
        f"default index does not help ({why}). Connect the host, let another host share its packages, or set ddp_python to a Python "
        "for which there is one. "
        f"`ddp_torch_index: default` accepts the CUDA build: about {bytes_text(CUDA_DOWNLOAD)} to download and "
        f"{bytes_text(CUDA_DISK)} of disk",
        "network",
    )


def pip_settings(run: Run, pip: Sequence[str]) -> dict[str, str]:
    """Proxy, certificates and indexes that pip would use, from its files and environment."""
    out = run([*pip, "config", "list"])[1]
    names = "proxy|cert|index-url|extra-index-url|find-links|no-index"
    pairs = re.findall(rf"^(\S+)\.({names})='(.*)'$", out, re.M)
    # The environment overrides files.
    return {name: value for dummy, name, value in sorted(pairs, key=lambda pair: pair[0] == ":env:")}


def answers(url: str, settings: Mapping[str, str]) -> bool:
    """Whether an index lists torch."""
    return page_of(url, "torch", settings) is not None


def page_of(url: str, project: str, settings: Mapping[str, str]) -> str | None:
    """An index's page of a project, fetched as pip would (proxies, certificates); None if it does not answer."""
    # Imported here because inspecting an environment needs none of it, and takes less time than loading it.
    import http.client
    import urllib.parse
    import urllib.request

    if url.startswith("file://"):
        folder = urllib.request.url2pathname(urllib.parse.urlparse(url).path)
        return read_text(os.path.join(folder, project, "index.html")) if os.path.isdir(folder) else None
    from ansible.module_utils.urls import ConnectionError as UrlError
    from ansible.module_utils.urls import open_url

    bundle = settings.get("cert") or os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    try:
        page = f"{url.rstrip('/')}/{project}/"
        ca_path = bundle if bundle and os.path.isfile(bundle) else None
        with (
            proxied(settings.get("proxy")),
            open_url(page, timeout=ANSWER_SECONDS, ca_path=ca_path, http_agent="nanochat.ddp") as response,
        ):
            return str(response.read(LONGEST_PAGE).decode("utf-8", "replace")) if response.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException, UrlError):
        return None


@contextlib.contextmanager
def proxied(proxy: str | None) -> Iterator[None]:
    """Set the proxy variables for a moment."""
    before = dict(os.environ)
    try:
        if proxy:
            os.environ.update(http_proxy=proxy, https_proxy=proxy)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


NETWORK = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|timed out|"
    r"Network is unreachable|No route to host|Connection refused|Max retries exceeded|ConnectTimeout|ProxyError|"
    r"Connection aborted|Connection reset|NewConnectionError|Cannot connect to proxy",
    re.I,
)
NO_MATCH = re.compile(r"No matching distribution found for ([^\s(]+)")
NEEDS_PYTHON = re.compile(r"(\S+) Requires-Python (>=[\d.]+)|requires a different Python: \S+ not in '([^']+)'")


def explain(wanted: VenvSpec, base: HostInterpreter, text: str) -> VenvError:
    """Turn pip's output into a sentence with advice."""
    who = f"{wanted.host}: the packages could not be installed in {wanted.path}"
    if re.search(r"No space left on device|Disk quota exceeded", text):
        return VenvError(
            f"{who}: the disk is full ({bytes_text(free_bytes(wanted.path))} free); make room there (pip also needs some in TMPDIR), or "
            "give another folder (ddp_venv_dir)",
            "disk",
        )
    if re.search("CERTIFICATE_VERIFY_FAILED|certificate verify failed", text, re.I):
        return VenvError(
            f"{who}: the package index's certificate is not trusted there; set the right CA bundle in that user's "
            "pip.conf (cert = ...) or set the clock right",
            "network",
        )
    missing = NO_MATCH.search(text)
    if wanted.offline:
        lacking = missing.group(1) if missing else last_line(text)
        return VenvError(
            f"{who}: the wheels in {wanted.wheels} do not match Python {base.minor} on {base.machine}: {lacking}; wheels must "
            "be fetched for the same Python and architecture",
            "wheels",
        )
    if NETWORK.search(text):
        return VenvError(
            f"{who}: no package index answers there ({last_line(text)}); connect the host, set an index that it can reach in "
            "that user's pip.conf, or set ddp_trainer_offline so that another host fetches the packages for it",
            "network",
        )
    if missing:
        old = f", which Python {base.minor} may be too old for" if NEEDS_PYTHON.search(text) else ""
        return VenvError(f"{who}: no package index has {missing.group(1)} for Python {base.minor}{old}", "requirement")
    return VenvError(f"{who}: pip said: {last_line(text)}", "other")


def last_line(text: str) -> str:
    """pip's last ERROR, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    chosen = (errors or lines or ["nothing"])[-1]
    return re.sub(r"^(ERROR|error):\s*", "", chosen)[:400].rstrip(".")


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


def platforms(machine: str) -> list[str]:
    """Wheel platforms that run on Linux with a glibc of the last ten years, newest first."""
    return [f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)] + [f"manylinux2014_{machine}"]


def wheels_ready(wanted: VenvSpec, target: dict[str, str]) -> bool:
    """Whether the wheels folder matches these requirements and this target."""
    return bool(read_json(os.path.join(wanted.wheels, ".wheels.json")) == wheels_stamp(wanted, target))


def wheels_stamp(wanted: VenvSpec, target: dict[str, str]) -> dict[str, object]:
    """The file that records which requirements a wheels folder was filled for."""
    return {"requirements": sorted(wanted.requirements), "target": target, "index": wanted.torch_index}


def fetch_wheels(wanted: VenvSpec, run: Run, base: HostInterpreter, pip: list[str], target: dict[str, str]) -> None:
    """Download wheels for hosts with the target's Python and architecture."""
    fresh = wanted.wheels.rstrip("/") + ".part"
    shutil.rmtree(fresh, ignore_errors=True)
    check_room(fresh, VENV_BYTES // 3, wanted.host)
    argv = [*pip, "download", "--no-input", "--disable-pip-version-check", "--retries", "2", "--only-binary=:all:"]
    other = []
    if [target["python"], target["machine"], "Linux"] != [base.minor, base.machine, base.system]:
        tag = "cp" + target["python"].replace(".", "")
        other = ["--python-version", target["python"], "--implementation", "cp"]
        other += [part for abi in (tag, "abi3", "none") for part in ("--abi", abi)]
        other += [part for name in platforms(target["machine"]) for part in ("--platform", name)]
    argv += ["--dest", fresh, *choose_index(wanted, run, pip, [], other)[1], *other]
    # Include pip for hosts whose Python lacks ensurepip.
    rc, out, err = run([*argv, *applicable(wanted.requirements, target["python"]), "pip"])
    if rc != 0:
        raise explain(wanted._replace(path=wanted.wheels), base, out + "\n" + err)
    write_json(os.path.join(fresh, ".wheels.json"), wheels_stamp(wanted, target))
    shutil.rmtree(wanted.wheels, ignore_errors=True)
    os.replace(fresh, wanted.wheels)
