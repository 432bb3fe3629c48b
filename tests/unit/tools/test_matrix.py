# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""README ticks what test.sh plays, and all other files name the same versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
NAMES = {"bookworm": "Debian 12", "trixie": "Debian 13", "testing": "Debian testing", "noble": "Ubuntu 24.04"}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def listed(name: str) -> list[str]:
    """A list at the head of test.sh."""
    (words,) = re.findall(rf"^{name}=\((.*)\)$", text("test.sh"), re.M)
    return [quoted or word for quoted, word in re.findall(r'"([^"]+)"|(\S+)', words)]


CORES = [line.split()[0] for line in listed("CORES")]
RELEASED = [core for core in CORES if not core.endswith("rc")]


def test_readme_ticks_the_systems_that_are_played():
    found = re.findall(r"^\| ((?:Debian|Ubuntu)[^|]*) \| ✔ \| ✔ \|$", text("README.md"), re.M)
    names = [f"{row.split()[0]} {one.strip()}" for row in found for one in row.partition(" ")[2].split(",")]
    assert names == [NAMES[system] for system in listed("SYSTEMS")]


def test_readme_ticks_the_versions_of_ansible_that_are_played():
    (row,) = re.findall(r"^\| ansible-core (.*) \| \| ✔ \|$", text("README.md"), re.M)
    assert [one.replace(" (release candidate)", "rc") for one in row.split(", ")] == CORES


def test_readme_ticks_the_pythons_that_are_played():
    (row,) = re.findall(r"^\| Python (.*) \(training: .*\) \| ✔ \| \|$", text("README.md"), re.M)
    assert row.split(", ") == listed("HOST_PYTHONS")


def test_the_controllers_requirement_and_the_collection_name_the_same_range():
    first, last = RELEASED[0], RELEASED[-1].split(".")
    wanted = f"ansible-core>={first},<{last[0]}.{int(last[1]) + 1}"
    assert wanted in text("tools/requirements/controller.txt").splitlines()
    assert f'"{wanted}"' in text(".github/workflows/release.yml")
    assert yaml.safe_load(text("meta/runtime.yml"))["requires_ansible"] == f">={first}.0"
    assert [path.stem for path in sorted(ROOT.glob("tests/sanity/ignore-*.txt"))] == [
        f"ignore-{core}" for core in RELEASED
    ]
    jobs = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]
    assert [one["ansible"] for one in jobs["versions"]["strategy"]["matrix"]["include"]] == RELEASED


@pytest.mark.parametrize("part", ["cores", "systems"])
def test_the_parts_run_by_themselves(part: str):
    """Before every merge, and at night."""
    assert part in re.findall(r"^ {10}- (\S+)$", text(".github/workflows/test.yml"), re.M)
    (rows,) = re.findall(rf"^{'EVERY_TIME' if part == 'cores' else 'THE_REST'}=\((.*)\)$", text("test.sh"), re.M)
    assert part in re.split(r'[",+ ]', rows)


def test_every_python_that_a_controller_may_have_gets_a_core():
    """tools/bootstrap.sh takes any Python from 3.11 on, and pip the newest release that it can run."""
    for python in ("3.11", "3.12", "3.13", "3.14"):
        assert any(python in line.split()[1:] for line in listed("CORES")), python
        assert f"python{python}" in text("tools/bootstrap.sh")
