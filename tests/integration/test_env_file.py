# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of env_file, read by the shells of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file as env_file_utils
from ansible_collections.nanochat.ddp.plugins.modules import env_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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
@example({"EMPTY": b"", "NEWLINES": b"\n\n", "ALL": bytes(range(1, 256)) * 2, "QUOTES": b"'''", "LONG": b"'" * 30000})
def test_every_shell_hands_on_every_byte(shell, tmp_path, env):
    path = tmp_path / "env"
    texts = {name: os.fsdecode(value) for name, value in env.items()}
    env_file_utils.store(str(path), env_file_utils.render(texts), 0o600)

    arrived = read_by(shell, path)

    assert {name: arrived.get(name) for name in env} == env
    assert env_file_utils.parse(path.read_bytes()) == texts


def test_the_longest_value_that_linux_passes_on_arrives(run_module, tmp_path):
    path = tmp_path / "env"
    longest = "x" * (131071 - len("T_LONG="))

    assert run_module(env_file, path=str(path), env={"T_LONG": longest})["changed"]
    assert read_by(["sh"], path)["T_LONG"] == longest.encode()
    assert run_module(env_file, path=str(path), env={"T_LONG": longest + "x"})["failed"]


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
