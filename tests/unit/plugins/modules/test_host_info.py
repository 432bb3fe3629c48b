# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around the facts."""

from __future__ import annotations

import re

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.modules import host_info


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; all fail."""
    found: list[list[str]] = []

    def run(argv: list[str], environ: dict[str, str]) -> tuple[int, str, str]:
        assert environ["LC_ALL"] == "C"
        found.append(argv)
        return 1, "", ""

    monkeypatch.setattr(bare, "run", run)
    return found


@pytest.mark.parametrize("check", [False, True])
def test_facts_are_the_same_in_check_mode_and_nothing_changes(run_module, commands, tmp_path, check):
    result = run_module(host_info, _check_mode=check, base_dir=str(tmp_path / "base"))
    assert result["changed"] is False
    assert result["probe"]["base_dir"] == str(tmp_path / "base")
    assert result["probe"]["run"] is None
    assert not (tmp_path / "base").exists()
    assert not any("sudo" in argv[0] and argv[1:] != ["-n", "true"] for argv in commands)


def test_tools_that_fail_are_no_failure(run_module, commands):
    result = run_module(host_info, peers=["192.0.2.77"], ports=[1])
    assert result["probe"]["python"]["candidates"] == []
    assert [entry["peer"] for entry in result["probe"]["routes"]] == ["192.0.2.77", "default"]


def test_a_port_that_is_no_number_is_refused(run_module):
    result = run_module(host_info, ports=["https"])
    assert result["failed"] and "ports" in result["msg"] and "https" in result["msg"]


def test_a_python_that_does_not_run_is_passed_over(run_module, monkeypatch, tmp_path):
    """A link to nothing, or a Python of a cross toolchain, says no more than that it is of no use."""
    broken = tmp_path / "python3"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    link = tmp_path / "python3.12"
    link.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(bare, "find", lambda name: None)
    for python in (broken, link):
        result = run_module(host_info, python=str(python), base_dir=str(tmp_path))
        assert str(python) not in [one["executable"] for one in result["probe"]["python"]["candidates"]]


@pytest.mark.parametrize("option", [{"base_dir": "/a\0b"}, {"peers": ["a", "b\0"]}, {"folders": ["\0"]}])
def test_a_nul_byte_is_refused_by_the_option_s_name(run_module, option):
    result = run_module(host_info, **option)
    assert result["failed"] and re.match(rf"{next(iter(option))}(\[\d\])? contains a NUL byte", result["msg"])
