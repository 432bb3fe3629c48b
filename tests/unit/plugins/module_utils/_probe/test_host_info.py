# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verb around the facts."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.host import host_info


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; all fail."""
    found: list[list[str]] = []

    def run(argv, environ=None, folder=None, seconds=None):
        assert environ["LC_ALL"] == "C"
        found.append(list(argv))
        return 1, "", ""

    monkeypatch.setattr(bare, "run", run)
    return found


def test_nothing_is_changed_and_tools_that_fail_are_no_failure(call, commands, tmp_path):
    probe = call(host_info, base_dir=str(tmp_path / "base"), peers=["192.0.2.77"], ports=[1])["probe"]
    assert (probe["base_dir"], probe["run"]) == (str(tmp_path / "base"), None)
    assert not (tmp_path / "base").exists()
    assert not any("sudo" in argv[0] and argv[1:] != ["-n", "true"] for argv in commands)
    assert probe["python"]["candidates"] == []
    assert [entry["peer"] for entry in probe["routes"]] == ["192.0.2.77", "default"]


def test_a_python_that_does_not_run_is_passed_over(call, tmp_path, monkeypatch):
    """A link to nothing, or a Python of a cross toolchain, says no more than that it is of no use."""
    broken = tmp_path / "python3"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    link = tmp_path / "python3.12"
    link.symlink_to(tmp_path / "gone")
    monkeypatch.setattr(bare, "find", lambda name: None)
    for python in (broken, link):
        probe = call(host_info, python=str(python), base_dir=str(tmp_path))["probe"]
        assert str(python) not in [one["executable"] for one in probe["python"]["candidates"]]
