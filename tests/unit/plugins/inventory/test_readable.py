# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An inventory that is no YAML is told in one sentence, with its line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
GOOD = "trainers:\n  hosts:\n    desktop: {ansible_host: 192.168.1.10, password: !vault secret}\n    laptop: {}\n"


def read(folder: Path, name: str, content: bytes) -> subprocess.CompletedProcess[str]:
    """Ansible reads an inventory of one file."""
    (folder / name).write_bytes(content)
    argv = ["ansible-inventory", "-i", str(folder / name), "--graph"]
    configuration = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NO_COLOR": "1"}
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **configuration}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("wrong", "put", "place"),
    [("}", "", ":4:11 "), ("host: 192", "host: [192", ":3:"), ("    desktop", "\t desktop", ":3:"), ("192", "\1", " ")],
)
def test_ansible_ends_with_one_sentence_that_names_the_place(tmp_path, wrong, put, place):
    done = read(tmp_path, "hosts.yml", GOOD.replace(wrong, put, 1).encode())
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1 and f"{tmp_path}/hosts.yml{place}" in done.stderr, done.stderr
    assert "cannot be read: YAML parsing failed: " in done.stderr


@pytest.mark.parametrize(
    ("name", "content"), [("hosts.yml", GOOD), ("hosts.json", '{\n\t"all": {}\n}'), ("hosts.ini", "[desktop]\n")]
)
def test_what_can_be_read_and_what_is_of_another_kind_is_left_to_ansible(tmp_path, name, content):
    assert read(tmp_path, name, content.encode()).returncode == 0
