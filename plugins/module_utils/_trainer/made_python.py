# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Python for the trainer on a host that has none that is new enough: made once by uv, below the base folder, without root."""

from __future__ import annotations

import glob
import os
import re
import shutil
import zipfile
from typing import Callable, Dict, List

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import MADE_PYTHON, UV
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import PYTHON_IN_FOLDER, PYTHON_MARK
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.urls import NO_CREDENTIALS, has_credentials
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import write_json, write_whole
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.interpreter import (
    VenvError,
    ask_interpreter,
    python_hint,
)

# A program with its arguments, and what its environment has besides.
RunWith = Callable[[List[str], Dict[str, str]], "tuple[int, str, str]"]
UV_IN_WHEEL = re.compile(r"uv-[^/]+\.data/scripts/uv$")


def is_made(run: RunWith, folder: str) -> bool:
    """Whether a Python is there that runs."""
    return ask_interpreter(lambda argv: run(argv, {}), os.path.join(folder, PYTHON_IN_FOLDER)) is not None


def make(run: RunWith, folder: str, wheels: str, host: str, mirror: str, lacking: str = "") -> None:
    """Makes it with uv out of the wheel that was brought; the link to it comes last."""
    if has_credentials(mirror):
        raise VenvError(f"{host}: mirror is {NO_CREDENTIALS}", "requirement")
    os.makedirs(folder, exist_ok=True)
    # First of all, so that what is left of a broken try is known as ours.
    write_json(os.path.join(folder, PYTHON_MARK), {"made_by": UV, "python": MADE_PYTHON})
    if lacking:
        raise VenvError(
            f"{host} has no Python that is new enough, and uv to install one is not available: {lacking}. {python_hint()}",
            "network",
        )
    tool = unpack(wheels, folder, host)
    environ = {"UV_CACHE_DIR": os.path.join(folder, "cache"), "UV_NO_PROGRESS": "1"}
    if mirror:
        environ["UV_PYTHON_INSTALL_MIRROR"] = mirror
    # What is there of the same version does not run.
    argv = [tool, "python", "install", "--no-bin", "--reinstall", "--install-dir", folder, MADE_PYTHON]
    rc, out, err = run(argv, environ)
    made = sorted(glob.glob(os.path.join(glob.escape(folder), f"cpython-{MADE_PYTHON}.*")))
    if rc != 0 or not made:
        raise VenvError(uv_error_text(host, folder, err or out), "python")
    link = os.path.join(folder, PYTHON_IN_FOLDER.split("/", 1)[0])
    if os.path.lexists(link + ".new"):
        os.unlink(link + ".new")
    os.symlink(os.path.basename(made[-1]), link + ".new")
    os.replace(link + ".new", link)
    os.unlink(tool)
    shutil.rmtree(environ["UV_CACHE_DIR"], ignore_errors=True)
    if not is_made(run, folder):
        raise VenvError(f"{host}: the Python that uv installed in {made[-1]} does not run. {python_hint()}", "python")


def unpack(wheels: str, folder: str, host: str) -> str:
    """The program in uv's wheel."""
    found = sorted(glob.glob(os.path.join(glob.escape(wheels), "uv-*.whl")))
    try:
        with zipfile.ZipFile(found[-1]) as archive:
            content = archive.read(next(name for name in archive.namelist() if UV_IN_WHEEL.match(name)))
    except (IndexError, StopIteration, OSError, zipfile.BadZipFile) as why:
        raise VenvError(f"{host}: {wheels} has no readable uv wheel ({why!r}). {python_hint()}", "wheels") from None
    tool = os.path.join(folder, "uv")
    write_whole(tool, content, 0o755)
    return tool


def uv_error_text(host: str, folder: str, words: str) -> str:
    """Why uv made none, in its words, and what to do."""
    lines = [re.sub(r"^\s*(error|cause|warning): ", "", line).strip() for line in words.splitlines() if line.strip()]
    download = next((line for line in lines if "download" in line and "://" in line), "")
    said = ": ".join(dict.fromkeys(line for line in (download, lines[-1] if lines else "no output") if line))
    return (
        f"{host} has no Python that is new enough, and uv could not install one in {folder}: {said}. uv downloads it from GitHub: connect "
        "the host, or set ddp_python_mirror to a mirror of https://github.com/astral-sh/python-build-standalone/releases/download, "
        f"as a URL or as file:///FOLDER on that host. {python_hint()}"
    )
