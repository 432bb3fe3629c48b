# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A test program goes on while other hosts start theirs, and leaves nothing behind."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import programs


@pytest.fixture
def started(call, tmp_path, monkeypatch):
    """`started(program)`: the folder of a shell's program."""
    monkeypatch.setattr(programs.tempfile, "tempdir", str(tmp_path))

    def start(program):
        argv = ["sh", "-c", program]
        return call(programs.start_program, argv=argv, folder=str(tmp_path), environ={"RANK": "1"})["folder"]

    return start


@pytest.mark.parametrize(
    ("program", "result"),
    [('echo "$RANK $PWD"; exit 3', (3, "1 {0}\n", "")), ("echo no torch >&2; kill $$", (-15, "", "no torch\n"))],
)
def test_its_output_is_brought_back(call, started, tmp_path, program, result):
    told = call(programs.end_program, folder=started(program), seconds=20)
    assert (told["rc"], told["stdout"], told["stderr"]) == (result[0], result[1].format(tmp_path), result[2])
    assert not list(tmp_path.glob("nanochat-ddp-*"))


def test_one_that_does_not_end_is_told_of(call, started):
    told = call(programs.end_program, folder=started("sleep 3"), seconds=0)
    assert told["rc"] == 124 and "did not end within 0 s" in told["stderr"]
