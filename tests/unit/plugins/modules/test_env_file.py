# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module env_file, and its files as the shells of this machine read them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess

import pytest
from ansible.module_utils.ansible_release import __version__
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.modules import env_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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
    assert mode_of(path) == 0o600
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

    assert result["diff"]["after_header"] == str(path)
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
    assert not again["changed"]


@pytest.mark.parametrize(
    "given, words",
    [
        ({"env": {"2X": "a"}}, "'2X' is not a valid environment variable name"),
        ({"env": {"": "a"}}, "'' is not a valid environment variable name"),
        ({"env": {"A\n": "a"}}, "'A\\n' is not a valid environment variable name"),
        *(({"mode": mode, "secrets": ["API_KEY"]}, "mode") for mode in ("0604", "999", "")),
        ({"path": "/no/env"}, "the folder /no does not exist"),
    ],
)
def test_refuses_what_no_process_could_get_and_everybody_could_read(run_module, path, given, words):
    """Others are in tests/pins, with their sentences."""
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


# -- what shells read -----------------------------------------------------------------------------------------------------

SHELLS = [["sh"], ["dash"], ["bash", "--posix"], ["bash"], ["busybox", "sh"], ["ksh"]]
PRESENT = [shell for shell in SHELLS if shutil.which(shell[0])]

# The shell has no PATH here, so that nothing of the surroundings can get mixed in.
ENV_PROGRAM = shutil.which("env")

# Bytes with a meaning for shells, drawn more often than the others.
FOND = st.sampled_from(
    [b"'", b'"', b"\\", b"$", b"`", b"\n", b"\r", b"\t", b" ", b"!", b"#", b"=", b"~", b"\x01", b"\x7f"]
)
CONTROL = st.sampled_from([bytes([byte]) for byte in range(0x80, 0x9A)])  # dash marks quoted text with these
ANY = st.integers(1, 255).map(lambda byte: bytes([byte]))
VALUES = st.lists(st.one_of(FOND, FOND, CONTROL, ANY), max_size=40).map(b"".join)
NAMES = st.from_regex(r"[A-Z_a-z][A-Z_a-z0-9]{0,12}", fullmatch=True).map(lambda name: f"T_{name}")
ENVIRONMENTS = st.dictionaries(NAMES, VALUES, max_size=12)


def environment_of(output):
    pairs = (entry.partition(b"=") for entry in output.split(b"\0") if entry)
    return {os.fsdecode(name): value for name, dummy, value in pairs}


def read_by(shell, path):
    """The environment that a program gets which this shell starts after it has read the file."""
    program = 'set -a; . "$1" || exit 1; set +a; exec "$2" -0'
    argv = [shutil.which(shell[0]), *shell[1:], "-c", program, "shell", str(path), ENV_PROGRAM]
    result = subprocess.run(argv, env={}, capture_output=True, check=True)
    assert result.stderr == b""
    return environment_of(result.stdout)


@pytest.mark.parametrize("shell", PRESENT, ids=" ".join)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENVIRONMENTS)
@example({})
# The longest value that Linux passes on.
@example({"T_LONG": b"x" * (131071 - len("T_LONG="))})
@example({"EMPTY": b"", "NEWLINES": b"\n\n", "ALL": bytes(range(1, 256)) * 2, "QUOTES": b"'''", "LONG": b"'" * 30000})
def test_every_shell_hands_on_every_byte(shell, tmp_path, env):
    path = tmp_path / "env"
    texts = {name: os.fsdecode(value) for name, value in env.items()}
    path.write_bytes(env_file_utils.render(texts))

    arrived = read_by(shell, path)

    assert {name: arrived.get(name) for name in env} == env
    assert env_file_utils.parse(path.read_bytes()) == texts


def test_names_that_shells_keep_are_those_that_are_refused(tmp_path):
    """Every variable that a shell of this machine has of its own must either arrive unchanged or be refused."""
    names = set()
    for shell in PRESENT:
        output = subprocess.run(
            [shutil.which(shell[0]), *shell[1:], "-c", "set"], env={}, capture_output=True, text=True, check=True
        )
        names |= {line.partition("=")[0] for line in output.stdout.splitlines() if "=" in line}
    names |= {
        "RANDOM",
        "SECONDS",
        "PS1",
        "PS4",
        "IFS",
        "TERM",
        "COLUMNS",
        "LC_ALL",
        "HISTFILE",
        "ENV",
        "BASH_ENV",
        "TZ",
    }
    path = tmp_path / "env"
    kept = set()
    for name in sorted(names - set(env_file_utils.SHELL_OWNED)):
        path.write_bytes(env_file_utils.render({name: "C.UTF-8"}))
        kept |= {name for shell in PRESENT if read_by(shell, path).get(name) != b"C.UTF-8"}

    assert not kept
