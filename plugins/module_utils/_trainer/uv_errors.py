# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Turns uv's output into one sentence with advice."""

from __future__ import annotations

import re

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 4
# What uv's output contains, the first that matches; what is missing; and the sentence.
EXPLAINED = (
    ("No space left on device|Disk quota exceeded", "disk", "uv said: {words}"),
    ("Hash mismatch", "", "uv said: {words}"),
    (
        "Failed to install cpython|python-build-standalone",
        "python",
        "the host has no Python of 3.10 or newer, and uv could not install one ({words}). uv downloads it from GitHub: connect the host; "
        "or set python-install-mirror in ~/.config/uv/uv.toml there to a mirror, or to file:///FOLDER; or install a newer Python",
    ),
    (
        "(?i)certificate|failed to fetch|error sending request|failed to download|dns error|timed out",
        "packages",
        "no package index answers there ({words}); connect the host, set an index that it can reach (or its cert) in that user's pip.conf, "
        "or set ddp_trainer_offline so that the controller fetches the packages for it",
    ),
    (
        r"torch==\S*\+cpu",
        "packages",
        f"no CPU build of torch is available there: {CPU_INDEX} did not answer within {ANSWER_SECONDS} s, and that user's package "
        "index has none. Connect the host, set an index that has one in that user's pip.conf, or accept the CUDA build with "
        "`ddp_torch: 2.13.0+cuda`: about 3.0 GB to download and 8.0 GB of disk",
    ),
    ("", "", "uv said: {words}"),
)


class VenvError(Exception):
    """A sentence, and whether packages from elsewhere would help."""

    def __init__(self, text: str, lacks_packages: bool = False) -> None:
        super().__init__(text)
        self.lacks_packages = lacks_packages


def explain(text: str, who: str, folder: str, wheels: str) -> VenvError:
    """Turn uv's output about a folder into a sentence; `wheels`: the packages that it was given, if not those of an index."""
    missing, told = next((missing, told) for pattern, missing, told in EXPLAINED if re.search(pattern, text))
    if wheels and missing not in ("disk", "python"):
        missing, told = "packages", f"the wheels in {wheels} are not those that the lock names ({{words}})"
    words = told.format(words=last_line(text))
    return VenvError(f"{who}: the packages could not be installed in {folder}: {words}", missing == "packages")


def last_line(text: str) -> str:
    """The cause in the words of uv, or of a Python."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("error:", "cause:"))]
    chosen = ": ".join(dict.fromkeys((causes[0], causes[-1]))) if causes else (lines or ["nothing"])[-1]
    return re.sub(r"(error|cause): ", "", chosen)[:400].rstrip(".")
