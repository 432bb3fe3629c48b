# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

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


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_writes_what_a_shell_reads_and_says_so(run_module, path):
    result = run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"])

    assert result["changed"]
    assert result["names"] == ["API_KEY", "GREETING", "THREADS"]
    assert env_file_utils.parse(path.read_bytes()) == {"THREADS": "8", "GREETING": "it's $HOME\n", "API_KEY": SECRET}
    assert mode_of(path) == 0o600
    assert result["diff"]["before"] == ""
    assert result["diff"]["after"] == ("# mode 0600\nAPI_KEY=********\nGREETING='it'\\''s $HOME\n'\nTHREADS='8'\n")


def test_check_mode_tells_the_same_and_writes_nothing(run_module, path):
    checked = run_module(env_file, _check_mode=True, path=str(path), env=ENV, secrets=["API_KEY"])
    assert not path.exists()

    done = run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"])
    assert checked["changed"] and checked["diff"] == done["diff"]


def test_check_mode_does_not_need_the_folder(run_module, tmp_path):
    assert run_module(env_file, _check_mode=True, path=str(tmp_path / "later/env"), env=ENV)["changed"]


def test_second_run_changes_nothing(run_module, path):
    run_module(env_file, path=str(path), env=ENV)
    before = path.stat()

    result = run_module(env_file, path=str(path), env=dict(reversed(ENV.items())))

    assert not result["changed"]
    assert result["diff"]["before"] == result["diff"]["after"]
    assert path.stat().st_ino == before.st_ino


def test_a_looser_mode_is_mended(run_module, path):
    run_module(env_file, path=str(path), env=ENV)
    path.chmod(0o644)

    result = run_module(env_file, path=str(path), env=ENV)

    assert result["changed"] and mode_of(path) == 0o600
    assert result["diff"]["before"].startswith("# mode 0644\n")


def test_a_changed_secret_is_seen_but_not_shown(run_module, path):
    run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"])

    result = run_module(env_file, path=str(path), env={**ENV, "API_KEY": "other-horse"}, secrets=["API_KEY"])

    assert "API_KEY=********\n" in result["diff"]["before"]
    assert "API_KEY=******** (changed)\n" in result["diff"]["after"]


def test_secrets_appear_nowhere(run_module, path, monkeypatch):
    logged = []
    monkeypatch.setattr(env_file.AnsibleModule, "log", lambda self, msg, log_args=None: logged.append((msg, log_args)))
    other = "another-long-secret"
    results = [
        run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"]),
        run_module(env_file, path=str(path), env={"API_KEY": other, "A": ""}, secrets=["API_KEY"]),
        run_module(env_file, path=str(path), env={"API_KEY": SECRET, "A": None}, secrets=["API_KEY"]),
        run_module(env_file, path=str(path), env={"API_KEY": SECRET}, secrets=["API_KEY"], state="nonsense"),
        run_module(env_file, path=str(path), state="absent"),
    ]
    assert [result.get("failed", False) for result in results] == [False, False, True, True, False]
    assert logged
    for text in (str(results), str(logged)):
        assert SECRET not in text and other not in text


def test_a_value_that_goes_away_is_not_shown(run_module, path):
    run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"])

    result = run_module(env_file, path=str(path), env={"THREADS": 8})

    assert SECRET not in str(result)
    assert "API_KEY=********\n" in result["diff"]["before"]


def test_short_secrets_do_not_blot_out_names(run_module, path):
    # From 2.21 on the controller asks for the arguments.
    told = {"_ansible_inject_invocation": True} if __version__ >= "2.21" else {}
    result = run_module(env_file, path=str(path), env={"PIN": "env"}, secrets=["PIN"], **told)

    assert result["path"] == str(path)
    assert result["diff"]["after"] == "# mode 0600\nPIN=********\n"
    assert result["invocation"]["module_args"]["env"] == {"PIN": "********"}


def test_a_file_of_another_kind_is_replaced_without_being_shown(run_module, path):
    path.write_text("export TOKEN=$(cat secret)\n")

    result = run_module(env_file, path=str(path), env={"A": "1"})

    assert result["changed"] and "TOKEN" not in str(result)
    assert env_file_utils.parse(path.read_bytes()) == {"A": "1"}


def test_assignments_of_another_hand_are_read_too():
    assert env_file_utils.parse(b"A='b'\nKEY='it'\\''s'\n") == {"A": "b", "KEY": "it's"}
    assert env_file_utils.parse(b"A=b\n") is None


def test_absent_removes_it_once(run_module, path):
    run_module(env_file, path=str(path), env=ENV)

    assert run_module(env_file, _check_mode=True, path=str(path), state="absent")["changed"]
    assert path.exists()
    assert run_module(env_file, path=str(path), state="absent")["changed"]
    assert not path.exists()
    again = run_module(env_file, path=str(path), state="absent")
    assert not again["changed"] and again["names"] == []


@pytest.mark.parametrize(
    "env, words",
    [
        ({"2X": "a"}, "'2X' is not a valid environment variable name"),
        ({"A-B": "a"}, "'A-B' is not a valid environment variable name"),
        ({"": "a"}, "'' is not a valid environment variable name"),
        ({"A\n": "a"}, "'A\\n' is not a valid environment variable name"),
        ({"UID": "a"}, "UID cannot be set"),
        ({"A": True}, "the value of A is bool"),
        ({"A": None}, "the value of A is NoneType"),
        ({"A": ["a"]}, "the value of A is list"),
        ({"A": "a\0b"}, "A contains a NUL byte"),
        ({"A": "x" * 131072}, "A is 131074 bytes long"),
    ],
)
def test_refuses_what_no_process_could_get(run_module, path, env, words):
    result = run_module(env_file, path=str(path), env=env)

    assert result["failed"] and words in result["msg"]
    assert not path.exists()


@pytest.mark.parametrize("mode", ["0644", "0604", "999", "rw", ""])
def test_refuses_modes_that_are_none_or_too_wide_for_secrets(run_module, path, mode):
    result = run_module(env_file, path=str(path), env=ENV, secrets=["API_KEY"], mode=mode)

    assert result["failed"] and "mode" in result["msg"]
    assert not path.exists()


def test_a_missing_folder_is_named(run_module, tmp_path):
    result = run_module(env_file, path=str(tmp_path / "no/env"), env=ENV)

    assert result["failed"]
    assert f"the folder {tmp_path}/no does not exist" in result["msg"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(run_module, path, monkeypatch):
    run_module(env_file, path=str(path), env=ENV)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run_module(env_file, path=str(path), env={"A": "1"})

    assert result["failed"] and result["msg"] == f"cannot write {path}: No space left on device"
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["env"]


def test_nobody_else_can_read_it_at_any_moment(run_module, path, monkeypatch):
    """The modes of all files in the folder are looked at before every system call that could widen them."""
    path.write_text("A='old'\n")
    path.chmod(0o666)
    seen = []

    def look(real):
        def watched(*arguments, **options):
            result = real(*arguments, **options)
            for entry in path.parent.iterdir():
                if b"correct-horse" in entry.read_bytes():
                    seen.append(mode_of(entry))
            return result

        return watched

    for name in ("fchmod", "fsync", "replace", "chmod", "rename"):
        monkeypatch.setattr(os, name, look(getattr(os, name)))
    run_module(env_file, path=str(path), env=ENV)

    assert seen and set(seen) == {0o600}
