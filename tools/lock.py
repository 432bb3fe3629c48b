# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes trainer/locks/*.txt: every package with the digests of its wheels for Linux, Python 3.10 to 3.14, x86_64 and aarch64.

    python tools/lock.py UV          UV: the program

The wanted packages are below and in trainer/requirements.txt. PyTorch's CPU wheels are those of trainer/locks/torch-cpu.sha256, which
has the lines of its index (https://download.pytorch.org/whl/cpu/torch/), so that the locks can be written where that is not reached.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".ansible/collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.versions import UV  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.plugin_utils._wheels import Package, packages  # noqa: E402

LOCKS = ROOT / "trainer/locks"
INDEX = os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The tags of wheels for our hosts.
OURS = re.compile(r"(py3\d*|cp3\d+)-(none|abi3|cp31[0-4])-(any|manylinux\w*_(x86_64|aarch64))")
# What each further lock is for, and its packages; versions are those of the trainer's own lock where that has one.
FURTHER = {
    "wandb": ("ddp_tracker: wandb", ["wandb==0.31.0"]),
    "mlflow": ("ddp_tracker: mlflow, on every host", ["mlflow-skinny==3.17.2"]),
    "zig": ("ddp_kernels: zig", ["ziglang==0.17.0"]),
}
ALONE = {
    "mlflow-server": ("the server of ddp_tracker: mlflow", "mlflow==3.17.2"),
    "uv": ("uv itself, which makes the environments", UV),
}
CUDA = re.compile(r"nvidia-|cuda-|triton$")
HEADER = "# Packages for {}. Written by tools/lock.py.\n# Checked: {}\n"


def resolve(uv: str, wanted: Sequence[str], constraints: Sequence[Path] = ()) -> list[Package]:
    """The packages that uv chooses, with the digests of the wheels that our hosts can use."""
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder, "in.txt"), Path(folder, "out.txt")
        source.write_text("\n".join(wanted) + "\n")
        limits = [word for path in constraints for word in ("--constraints", str(path))]
        argv = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-build", "--no-header"]
        argv += ["--no-annotate", "--python-version", PYTHONS[0], *limits, "-o", str(lock), str(source)]
        subprocess.run(argv, check=True)
        return [only_ours(one) for one in packages(lock.read_text()) if "== 'win32'" not in one.marker]


def only_ours(package: Package) -> Package:
    """The package with those of its digests that belong to wheels for our hosts."""
    headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(f"{INDEX}/{package.name}/", headers=headers)) as answer:
        files = {one["hashes"]["sha256"]: str(one["filename"]) for one in json.load(answer)["files"]}
    found = [
        digest
        for digest in package.digests
        if files.get(digest, "").endswith(".whl")
        and any(OURS.fullmatch(str(tag)) for tag in parse_wheel_filename(files[digest])[3])
    ]
    if not found:
        raise SystemExit(f"{package.name} {package.version} has no wheel for Linux")
    return package._replace(digests=tuple(sorted(found)))


def text_of(purpose: str, checked: Sequence[str], found: Sequence[Package]) -> str:
    lines = [HEADER.format(purpose, " ".join(sorted(checked)))]
    for one in found:
        marker = f" ; {one.marker}" if one.marker else ""
        digests = [f"    --hash=sha256:{digest}" for digest in one.digests]
        lines.append(" \\\n".join([f"{one.name}=={one.version}{marker}", *digests]) + "\n")
    return "".join(lines)


def cpu_build(found: Sequence[Package]) -> list[Package]:
    """The same packages with PyTorch's CPU build, which needs none of CUDA's."""
    lines = [line.split() for line in (LOCKS / "torch-cpu.sha256").read_text().splitlines()]
    (version,) = {name.split("-")[1] for dummy, name in lines}
    torch = Package("torch", version, "", tuple(sorted(digest for digest, dummy in lines)))
    return [torch if one.name == "torch" else one for one in found if not CUDA.match(one.name)]


def main() -> None:
    uv = sys.argv[1]
    wanted = [line for line in (ROOT / "trainer/requirements.txt").read_text().splitlines() if not line.startswith("#")]
    checked = sorted({re.split("[=<>;]", line)[0] for line in wanted})
    found = resolve(uv, wanted)
    own = LOCKS / "trainer-default.txt"
    own.write_text(text_of("the trainer, with the default index's build of torch", checked, found))
    (LOCKS / "trainer-cpu.txt").write_text(text_of("the trainer, with a CPU build of torch", checked, cpu_build(found)))
    names = {one.name for one in found}
    earlier = [own]
    for name, (purpose, asked) in FURTHER.items():
        more = [one for one in resolve(uv, asked, earlier) if one.name not in names]
        wanted = sorted({re.split("[=<>;]", one)[0] for one in asked} - names)
        earlier.append(LOCKS / f"{name}.txt")
        earlier[-1].write_text(text_of(purpose, wanted, more))
    # Environments of their own, which hold nothing else.
    for name, (purpose, package) in ALONE.items():
        (LOCKS / f"{name}.txt").write_text(
            text_of(purpose, [package.split("==", maxsplit=1)[0]], resolve(uv, [package]))
        )


if __name__ == "__main__":
    main()
