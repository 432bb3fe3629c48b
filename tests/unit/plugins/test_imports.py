# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every file of the plugins can be imported, and every play read, with this Python and this ansible-core."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ROOT / "plugins"
FILES = sorted(path for path in PLUGINS.rglob("*.py") if "doc_fragments" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PLUGINS)))
def test_import(path: Path) -> None:
    name = ".".join(path.relative_to(PLUGINS).with_suffix("").parts)
    importlib.import_module(f"ansible_collections.nanochat.ddp.plugins.{name}")


def test_ansible_reads_the_main_play_without_a_word_of_its_own() -> None:
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible/collections"), "NO_COLOR": "1"}
    argv = [
        f"{Path(sys.executable).parent}/ansible-playbook",
        "nanochat.ddp.train",
        "--list-tasks",
        "-i",
        f"{ROOT}/inventory",
    ]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Create the trainer's environment" in done.stdout, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout + done.stderr, done.stderr
