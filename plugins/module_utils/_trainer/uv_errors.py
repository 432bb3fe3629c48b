# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Turns uv's output into one sentence with advice."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from .._kit.files import free_bytes
from .._kit.words import bytes_text

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 4
# The cost of the CUDA build with all that it needs.
CUDA_DOWNLOAD, CUDA_DISK = 3_000_000_000, 8_000_000_000


class VenvError(Exception):
    """A sentence, and a code for the reason so that callers can try something else."""

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


class VenvSpec(NamedTuple):
    """The wanted environment."""

    host: str
    path: str
    python: str  # an interpreter; one that the plan would have made may be absent
    digest: str  # of the lock
    pins: Mapping[str, list[str]]  # the packages that the trainer imports, with their versions in the lock
    lock: str = ""  # its text, in uv's format; only needed to install
    torch_index: str = "auto"  # auto, default or a URL
    wheels: str = ""  # a folder of wheels, or of such folders
    offline: bool = False
    uv: str = ""  # the program


def explain(text: str, wanted: VenvSpec, kind: str, index: str) -> VenvError:
    """Turn uv's output into a sentence with advice."""
    host, path = wanted.host, wanted.path
    who, words = f"{host}: the packages could not be installed in {path}", last_line(text)
    if re.search(r"No space left on device|Disk quota exceeded", text):
        free = bytes_text(free_bytes(os.path.dirname(path)))
        return VenvError(
            f"{who}: the disk is full ({free} free); make room there, or give another folder (ddp_venv_dir)", "disk"
        )
    if "Failed to install cpython" in text or "python-build-standalone" in text:
        return VenvError(
            f"{host} has no Python of 3.10 or newer, and uv could not install one: {words}. uv downloads it from GitHub: connect "
            "the host; or set python-install-mirror in ~/.config/uv/uv.toml there to a mirror, or to file:///FOLDER; or install a "
            "newer Python",
            "python",
        )
    if re.search("certificate", text, re.I):
        return VenvError(
            f"{who}: the package index's certificate is not trusted there ({words}); set the right CA bundle in that user's "
            "pip.conf (cert = ...) or set the clock right",
            "network",
        )
    if wanted.offline:
        return VenvError(
            f"{who}: the wheels in {index} are not those that the lock names for {kind} ({words})",
            "wheels",
        )
    if "Hash mismatch" in text:
        return VenvError(
            f"{who}: a package differs from the one in the trainer's lock ({words}); the index that has it is not to be trusted"
        )
    if re.search(r"Failed to fetch|error sending request|Failed to download|dns error|timed out", text):
        return VenvError(
            f"{who}: no package index answers there ({words}); connect the host, set an index that it can reach in "
            "that user's pip.conf, or set ddp_trainer_offline so that the controller fetches the packages for it",
            "network",
        )
    if "torch==" in text and "+cpu" in text:
        return VenvError(
            f"{who}: no CPU build of torch is available there: {CPU_INDEX} did not answer within {ANSWER_SECONDS} s, and that user's "
            "package index has none. Connect the host, set an index that has one in that user's pip.conf, or accept the CUDA build with "
            f"`ddp_torch: 2.13.0+cuda`: about {bytes_text(CUDA_DOWNLOAD)} to download and {bytes_text(CUDA_DISK)} of disk",
            "network",
        )
    return VenvError(f"{who}: uv said: {words}", "requirement" if "no version of" in text else "other")


def last_line(text: str) -> str:
    """The cause in the words of uv, or of a Python."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("error:", "cause:"))]
    chosen = ": ".join(dict.fromkeys((causes[0], causes[-1]))) if causes else (lines or ["nothing"])[-1]
    return re.sub(r"(error|cause): ", "", chosen)[:400].rstrip(".")
