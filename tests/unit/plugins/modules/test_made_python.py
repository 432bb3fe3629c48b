# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Python that is made where none is new enough, with a stand-in for uv that is a program of the shell."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import MAKE_PYTHON
from ansible_collections.nanochat.ddp.plugins.modules import made_python as module

# As uv is called: uv python install --no-bin --reinstall --install-dir FOLDER VERSION
MAKES = f"""#!/bin/sh
mkdir -p "$6/cpython-$7.9-linux-x86_64-gnu/bin"
ln -s {sys.executable} "$6/cpython-$7.9-linux-x86_64-gnu/bin/python3"
echo "$UV_PYTHON_INSTALL_MIRROR" >"$6/mirror"
"""
# What uv 0.13.9 says without a network.
FAILS = """#!/bin/sh
cat >&2 <<'WORDS'
error: Failed to install cpython-3.12.16-linux-x86_64-gnu
  cause: Request failed after 3 retries in 9.8s
  cause: Failed to download `https://github.com/astral-sh/x.tar.gz`
  cause: dns error
  cause: failed to lookup address information: Name or service not known
WORDS
exit 1
"""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "wheels").mkdir()
    return {"host": "laptop", "path": str(tmp_path / "base" / "python"), "wheels_dir": str(tmp_path / "wheels")}


def wheel(options: dict[str, str], program: str) -> None:
    with zipfile.ZipFile(Path(options["wheels_dir"]) / "uv-0.13.9-py3-none-any.whl", "w") as archive:
        archive.writestr("uv/__init__.py", "")
        archive.writestr("uv-0.13.9.data/scripts/uv", program)


def test_it_is_made_once(run_module: Any, options: dict[str, str]) -> None:
    wheel(options, MAKES)
    folder = Path(options["path"])
    assert run_module(module, True, **options)["changed"] is True
    assert not folder.exists()
    made = run_module(module, mirror="file:///mnt/mirror", **options)
    assert made["changed"] is True
    assert Path(made["python"]) == folder / "current/bin/python3"
    assert Path(made["python"]).resolve() == Path(sys.executable).resolve()
    assert (folder / "mirror").read_text() == "file:///mnt/mirror\n"
    assert not (folder / "uv").exists()
    assert run_module(module, **options)["changed"] is False


def test_a_failure_names_the_download_the_mirror_and_what_to_type(run_module: Any, options: dict[str, str]) -> None:
    wheel(options, FAILS)
    told = run_module(module, **options)
    assert (told["failed"], told["reason"]) == (True, "python")
    for words in (
        "laptop has no Python",
        "Failed to download `https://github.com/astral-sh/x.tar.gz`: failed to lookup address information",
        "ddp_python_mirror",
        MAKE_PYTHON,
    ):
        assert words in told["msg"]


@pytest.mark.parametrize(
    ("content", "lacking", "words"),
    [
        (None, "", "has no readable uv wheel"),
        (b"no archive", "", "has no readable uv wheel"),
        (
            None,
            "the controller: no package index answers",
            "uv to install one is not available: the controller: no package",
        ),
    ],
)
def test_without_uv_it_says_why(
    run_module: Any, options: dict[str, str], content: bytes | None, lacking: str, words: str
) -> None:
    if content:
        (Path(options["wheels_dir"]) / "uv-0.13.9-py3-none-any.whl").write_bytes(content)
    told = run_module(module, lacking=lacking, **options)
    assert words in told["msg"]
    assert MAKE_PYTHON in told["msg"]


def test_what_does_not_run_is_made_again(run_module: Any, options: dict[str, str]) -> None:
    wheel(options, MAKES)
    run_module(module, **options)
    python = Path(options["path"]) / "current/bin/python3"
    python.unlink()
    assert run_module(module, **options)["changed"] is True
    assert python.exists()
