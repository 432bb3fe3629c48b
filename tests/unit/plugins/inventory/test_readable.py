# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An inventory that is no YAML is told in one sentence, with its line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.inventory.readable import problem_of

ROOT = Path(__file__).resolve().parents[4]
GOOD = "trainers:\n  hosts:\n    desktop: {ansible_host: 192.168.1.10, password: !vault secret}\n    laptop: {}\n"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [("}", ": line 4, column 11, expected"), ("host: 192", ": line 3, column "), ("    desktop", ": line 3, ")],
)
def test_where_it_is_no_yaml_is_said(tmp_path, wrong, line):
    path = tmp_path / "hosts.yml"
    path.write_text(GOOD.replace(wrong, {"}": "", "host: 192": "host: [192}", "    desktop": "\t desktop"}[wrong], 1))
    told = problem_of(str(path))
    assert told is not None and told.startswith(f"The inventory {path} cannot be read{line}")


@pytest.mark.parametrize("content", [GOOD, "", '{\n\t"all": {}\n}', "[desktop]\n"])
def test_what_can_be_read_and_what_is_of_another_kind_is_left_to_ansible(tmp_path, content):
    path = tmp_path / ("hosts.ini" if content.startswith("[") else "hosts.yml")
    path.write_text(content)
    assert problem_of(str(path)) is None
    assert problem_of(str(tmp_path / "none.yml")) is None


@pytest.mark.parametrize(
    ("content", "why"), [(b"a: \xff", "not written in UTF-8"), (b"a: \x01", "remove that character")]
)
def test_bytes_that_are_no_text_are_said(tmp_path, content, why):
    path = tmp_path / "hosts.yml"
    path.write_bytes(content)
    assert why in (problem_of(str(path)) or "")


def test_ansible_ends_with_that_one_sentence(tmp_path):
    (tmp_path / "hosts.yml").write_text(GOOD.replace("}", "", 1))
    done = subprocess.run(
        ["ansible-playbook", "playbooks/status.yml", "-i", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1 and "hosts.yml cannot be read: line 4, column 11" in done.stderr
