# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing whole files, reading JSON or nothing, locks with a limit."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import files


def test_a_file_gets_content_and_mode(tmp_path):
    path = tmp_path / "secret"
    files.write_whole(str(path), "KEY=1\n", 0o600)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("KEY=1\n", 0o600)
    files.write_whole(str(path), b"\xff", 0o644, durable=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\xff", 0o644)
    files.write_whole(str(path), "")
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]
    files.write_whole(str(path), b"a\xff")
    assert (files.read_text(str(path)), files.read_bytes(str(path))) == ("a\ufffd", b"a\xff")
    assert (files.read_text(f"{tmp_path}/none"), files.read_bytes(f"{tmp_path}/none")) == ("", b"")


def test_what_cannot_be_written_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*dummy):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as error:
        files.write_whole(str(path), "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]

    with pytest.raises(OSError, match="none") as error:
        files.write_whole(str(tmp_path / "none/plan.json"), "new")
    assert str(error.value.filename).startswith(str(tmp_path / "none/.plan.json"))


@pytest.mark.parametrize(
    "content", [b"", b'{"torn": ', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"[1]", b"null"]
)
def test_what_is_no_json_or_no_object_reads_as_nothing(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert files.read_object(str(path)) == {}


def test_a_lock_that_another_holds_is_waited_for_and_not_without_end(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(files.Busy), files.locked(str(tmp_path), 0.2):
        raise AssertionError("two have the lock")
    threading.Timer(0.2, os.close, [descriptor]).start()
    with files.locked(str(tmp_path), 60):
        pass
    with files.locked(str(tmp_path / "file.lock"), 0):
        assert (tmp_path / "file.lock").exists()
