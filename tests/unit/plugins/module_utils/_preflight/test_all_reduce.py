# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The all-reduce goes on while other hosts start theirs, and leaves nothing behind."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import all_reduce


@pytest.fixture
def started(call, tmp_path, monkeypatch):
    """`started(program, seconds)`: the folder of a program in place of the trainer's Python."""
    monkeypatch.setattr(all_reduce.tempfile, "tempdir", str(tmp_path))

    def start(program, seconds=20):
        python = tmp_path / "a python"
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
        params = {"python": str(python), "trainer": str(tmp_path), "timeout": 2.5, "environ": {"RANK": "1"}}
        return call(all_reduce.start_all_reduce, seconds=seconds, **params)["folder"]

    return start


@pytest.mark.parametrize(
    ("program", "seconds", "result"),
    [
        ('echo "$RANK $PYTHONPATH $*"; exit 3', 20, (3, "1 {0} -m scripts.gloo_check --timeout 2.5\n", "")),
        ("echo no torch >&2; sleep 60", 1, (124, "", "no torch\n")),
    ],
)
def test_its_output_is_brought_back(call, started, tmp_path, program, seconds, result):
    told = call(all_reduce.end_all_reduce, folder=started(program, seconds), seconds=20)
    assert (told["rc"], told["stdout"], told["stderr"]) == (result[0], result[1].format(tmp_path), result[2])
    assert not list(tmp_path.glob("nanochat-ddp-*"))


def test_one_that_does_not_end_is_told_of(call, started):
    told = call(all_reduce.end_all_reduce, folder=started("sleep 3"), seconds=0)
    assert told["rc"] == 124 and "did not end within 0 s" in told["stderr"]
