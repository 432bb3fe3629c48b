# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module env_file; tests/integration reads its files with the shells of this machine."""

from __future__ import annotations

import os
import stat

import pytest
from ansible.module_utils.ansible_release import __version__
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.modules import env_file

SECRET = "correct-horse-battery"
ENV = {"THREADS": 8, "GREETING": "it's $HOME\n", "API_KEY": SECRET}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "env"


@pytest.fixture
def write(run_module, path):
    """`write(env, **options)` plays the module for the file."""
    return lambda env=ENV, check=False, **options: run_module(
        env_file, _check_mode=check, path=str(path), **({"env": env} if env is not None else {}), **options
    )


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_shell_reads_is_predicted_written_and_left_alone(write, path):
    checked = write(secrets=["API_KEY"], check=True)
    assert not path.exists()
    done = write(secrets=["API_KEY"])
    assert done["changed"] and checked["changed"] and checked["diff"] == done["diff"]
    assert done["names"] == ["API_KEY", "GREETING", "THREADS"] and mode_of(path) == 0o600
    assert env_file_utils.parse(path.read_bytes()) == {"THREADS": "8", "GREETING": "it's $HOME\n", "API_KEY": SECRET}
    assert done["diff"]["before"] == ""
    assert done["diff"]["after"] == "# mode 0600\nAPI_KEY=********\nGREETING='it'\\''s $HOME\n'\nTHREADS='8'\n"
    before = path.stat()
    again = write(dict(reversed(ENV.items())))
    assert not again["changed"] and again["diff"]["before"] == again["diff"]["after"]
    assert path.stat().st_ino == before.st_ino
    path.chmod(0o644)
    mended = write()
    assert mended["changed"] and mode_of(path) == 0o600 and mended["diff"]["before"].startswith("# mode 0644\n")


def test_check_mode_does_not_need_the_folder(run_module, tmp_path):
    assert run_module(env_file, _check_mode=True, path=str(tmp_path / "later/env"), env=ENV)["changed"]


def test_secrets_appear_nowhere(write, monkeypatch):
    logged = []
    monkeypatch.setattr(env_file.AnsibleModule, "log", lambda self, msg, log_args=None: logged.append((msg, log_args)))
    other = "another-long-secret"
    results = [
        write(secrets=["API_KEY"]),
        changed := write({"API_KEY": other, "A": ""}, secrets=["API_KEY"]),
        write({"API_KEY": SECRET, "A": None}, secrets=["API_KEY"]),
        write({"API_KEY": SECRET}, secrets=["API_KEY"], state="nonsense"),
        gone := write({"THREADS": 8}),
        write(None, state="absent"),
    ]
    assert [result.get("failed", False) for result in results] == [False, False, True, True, False, False]
    assert "API_KEY=********\n" in changed["diff"]["before"] and "API_KEY=******** (chan" in changed["diff"]["after"]
    assert "API_KEY=********\n" in gone["diff"]["before"]
    assert logged
    for text in (str(results), str(logged)):
        assert SECRET not in text and other not in text


def test_short_secrets_do_not_blot_out_names(write, path):
    # From 2.21 on the controller asks for the arguments.
    told = {"_ansible_inject_invocation": True} if __version__ >= "2.21" else {}
    result = write({"PIN": "env"}, secrets=["PIN"], **told)

    assert result["path"] == str(path)
    assert result["diff"]["after"] == "# mode 0600\nPIN=********\n"
    assert result["invocation"]["module_args"]["env"] == {"PIN": "********"}


def test_a_file_of_another_hand_is_read_if_it_is_alike_or_replaced_without_being_shown(write, path):
    path.write_text("A='b'\nKEY='it'\\''s'\n")
    assert env_file_utils.parse(path.read_bytes()) == {"A": "b", "KEY": "it's"}
    path.write_text("export TOKEN=$(cat secret)\n")
    result = write({"A": "1"})
    assert result["changed"] and "TOKEN" not in str(result)
    assert env_file_utils.parse(path.read_bytes()) == {"A": "1"}


def test_absent_removes_it_once(write, path):
    write()
    assert write(None, check=True, state="absent")["changed"] and path.exists()
    assert write(None, state="absent")["changed"] and not path.exists()
    again = write(None, state="absent")
    assert not again["changed"] and again["names"] == []


@pytest.mark.parametrize(
    "given, words",
    [
        ({"env": {"2X": "a"}}, "'2X' is not a valid environment variable name"),
        ({"env": {"A-B": "a"}}, "'A-B' is not a valid environment variable name"),
        ({"env": {"": "a"}}, "'' is not a valid environment variable name"),
        ({"env": {"A\n": "a"}}, "'A\\n' is not a valid environment variable name"),
        ({"env": {"UID": "a"}}, "UID cannot be set"),
        ({"env": {"A": True}}, "the value of A is bool"),
        ({"env": {"A": None}}, "the value of A is NoneType"),
        ({"env": {"A": ["a"]}}, "the value of A is list"),
        ({"env": {"A": "a\0b"}}, "A contains a NUL byte"),
        ({"env": {"A": "x" * 131072}}, "A is 131074 bytes long"),
        *(({"mode": mode, "secrets": ["API_KEY"]}, "mode") for mode in ("0644", "0604", "999", "rw", "")),
        ({"path": "/no/env"}, "the folder /no does not exist"),
    ],
)
def test_refuses_what_no_process_could_get_and_everybody_could_read(run_module, path, given, words):
    result = run_module(env_file, **{"path": str(path), "env": ENV, **given})

    assert result["failed"] and words in result["msg"]
    assert not path.exists()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(write, path, monkeypatch):
    write()
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = write({"A": "1"})

    assert result["failed"] and result["msg"] == f"cannot write {path}: No space left on device"
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["env"]


def test_nobody_else_can_read_it_at_any_moment(write, path, monkeypatch):
    """The modes of all files in the folder are looked at before every system call that could widen them."""
    path.write_text("A='old'\n")
    path.chmod(0o666)
    seen = []

    def look(real):
        def watched(*arguments, **options):
            result = real(*arguments, **options)
            seen.extend(mode_of(entry) for entry in path.parent.iterdir() if b"correct-horse" in entry.read_bytes())
            return result

        return watched

    for name in ("fchmod", "fsync", "replace", "chmod", "rename"):
        monkeypatch.setattr(os, name, look(getattr(os, name)))
    write()

    assert seen and set(seen) == {0o600}
