# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of the machine, from files as real hosts have them, and once from this one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, ownership, processes
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host as info
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import leftovers, machine

GIGA = 2**30


@pytest.fixture
def files(monkeypatch):
    """Contents of files of /proc and /sys; all others are empty."""
    found: dict[str, str] = {}
    monkeypatch.setattr(machine, "read", lambda path, default="": found.get(path, default))
    return found


@pytest.mark.parametrize(
    ("line", "native"),
    [("flags : fpu avx2 avx512_bf16", True), ("flags : fpu avx2", False), ("Features : asimd bf16", True)],
)
def test_field_10_whether_the_cpu_has_bfloat16(files, line, native):
    files["/proc/cpuinfo"] = f"processor : 0\nmodel name : Some CPU\n{line}\n\nprocessor : 1\n{line}\n"
    facts = machine.cpu()
    assert facts["native_bf16"] is native
    assert facts["model"] == "Some CPU"
    assert "fpu" not in facts["flags"]


def test_whether_there_is_a_compiler_for_the_kernels(files, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.cpu()["compiler"] is False
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    assert machine.cpu()["compiler"] is True


LOGINS = """Name=lzw
Class=user
Type=wayland
State=active

Name=eve
Class=user
Type=tty
State=active

Name=gdm
Class=greeter
Type=wayland
State=online
"""


def test_who_is_logged_in_graphically(monkeypatch):
    told = {
        "list-sessions": (0, "2 1000 lzw seat0\n5 1001 eve\nc1 42 gdm seat0\n", ""),
        "show-session": (0, LOGINS, ""),
    }
    monkeypatch.setattr(machine.bare, "tool", lambda argv: told.get(argv[1], (127, "", "")))
    assert machine.usage() == {"graphical": ["lzw"], "blind": []}
    told.clear()
    assert machine.usage() == {"graphical": [], "blind": ["logind"]}


def test_a_quota_of_processor_time_limits_the_cores(files):
    files["/proc/self/cgroup"] = "0::/user.slice/run-1.scope"
    assert machine.cpu_quota() is None
    files["/sys/fs/cgroup/user.slice/cpu.max"] = "max 100000"
    files["/sys/fs/cgroup/user.slice/run-1.scope/cpu.max"] = "250000 100000"
    assert machine.cpu_quota() == 2.5
    quotas = {(8, 2.5): 3, (2, 2.5): 2, (8, 0.2): 1, (8, None): 8}
    assert {given: machine.limited(*given) for given in quotas} == quotas


def test_memory_is_what_the_control_group_leaves(files):
    files["/proc/meminfo"] = (
        f"MemTotal: {16 * GIGA // 1024} kB\nMemAvailable: {12 * GIGA // 1024} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    )
    assert machine.memory() == {"total": 16 * GIGA, "available": 12 * GIGA}
    files["/proc/self/cgroup"] = "0::/box"
    files["/sys/fs/cgroup/memory.max"] = "max"
    files["/sys/fs/cgroup/box/memory.max"] = str(4 * GIGA)
    files["/sys/fs/cgroup/box/memory.current"] = str(3 * GIGA)
    files["/sys/fs/cgroup/box/memory.stat"] = f"anon 1\ninactive_file {GIGA}\nactive_file 5"
    assert machine.memory() == {"total": 4 * GIGA, "available": 2 * GIGA}


def test_the_file_system_of_a_path(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 22 0:50 / /home rw - nfs4 server:/home rw\n"
        "31 22 0:51 / /home\\040two rw - xfs /dev/sdb1 rw\n"
        "32 22 0:52 / /mnt/x rw - fuse.sshfs me@there: rw\n"
    )
    assert ownership.mount_of("/home/me/n", str(mounts)) == ("nfs4", "server:/home")
    assert ownership.mount_of("/homes", str(mounts)) == ("ext4", "/dev/sda1")
    assert ownership.mount_of("/home two/n", str(mounts)) == ("xfs", "/dev/sdb1")
    assert ownership.mount_of("/mnt/x", str(mounts)) == ("fuse.sshfs", "me@there:")


def test_pythons_that_are_too_old_or_do_not_run_are_no_candidates(call, tmp_path, monkeypatch):
    """Such as a link to nothing, or a Python of a cross toolchain."""
    programs = {
        "fine": "#!/bin/sh\necho 3.10.0",
        "old": "#!/bin/sh\necho 3.9.18",
        "foreign": "\x7fELF of another machine",
    }
    monkeypatch.setattr(bare, "find", lambda name: shutil.which(name) if "/" in name else None)
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    found = []
    for name in (*programs, "gone"):
        python = tmp_path / name
        if name in programs:
            python.write_text(programs[name])
            python.chmod(0o755)
        told = call(info.host_info, python=str(python), base_dir=str(tmp_path))["probe"]["python"]
        found += [one for one in told["candidates"] if one["executable"] == str(python)]
        assert (Path(told["library"]) / "os.py").exists()
    assert found == [{"executable": str(tmp_path / "fine"), "version": "3.10.0"}]


def test_shims_and_old_pythons_of_pyenv_are_not_even_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(bare, "find", lambda name: f"{tmp_path}/.pyenv/shims/{name}")
    for version in ("3.6.15", "3.9.18", "3.12.1"):
        (tmp_path / ".pyenv/versions" / version / "bin").mkdir(parents=True)
        (tmp_path / ".pyenv/versions" / version / "bin/python3").write_text(version)
    paths = [path for path in info.python_paths(None, str(tmp_path / "base")) if str(tmp_path) in path]
    assert paths == [str(tmp_path / ".pyenv/versions/3.12.1/bin/python3")]
    # One that was made for the trainer is found where the plan wants it.
    (tmp_path / "base/python/current/bin").mkdir(parents=True)
    (tmp_path / "base/python/current/bin/python3").write_text("made")
    made = str(tmp_path / "base/python/current/bin/python3")
    assert made in info.python_paths(None, str(tmp_path / "base"))


def test_what_an_earlier_run_left(tmp_path):
    none = leftovers.run_facts(str(tmp_path / "none"))
    assert not any(value for name, value in none.items() if name not in ("path", "lineage"))
    assert none["lineage"] == {"model": {}, "stage": {}, "data": {}}
    (tmp_path / "plan.json").write_text(
        '{"digest": "abcd", "training": {"sync":"int8"}, "nodes": [{"host": "a", "rows": 4, "cores": [0]}, {"host": "b", "cores": "x"}, 7]}'
    )
    (tmp_path / "session.json").write_text('{"id": "x1"}')
    (tmp_path / "base_checkpoints/d4").mkdir(parents=True)
    for step in (10, 5):
        (tmp_path / f"base_checkpoints/d4/meta_{step:06d}.json").write_text("{}")
    facts = leftovers.run_facts(str(tmp_path))
    assert facts["sync"] == "int8"
    assert facts["shares"] == {
        "a": {"rows": 4, "head_share": 0, "cores": [0], "polite": "off"},
        "b": {"rows": 0, "head_share": 0, "cores": None, "polite": "off"},
    }
    assert (facts["plan_digest"], facts["session"], facts["checkpoints"]) == ("abcd", {"id": "x1"}, [5, 10])
    # Torn files are as good as none.
    (tmp_path / "plan.json").write_text('{"digest": ')
    (tmp_path / "session.json").write_text("[]")
    facts = leftovers.run_facts(str(tmp_path))
    assert facts["plan_digest"] is facts["session"] is None


LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_field_06_the_holder_of_a_port_is_named():
    child = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout
        port = int(child.stdout.readline())
        (holder,) = leftovers.port_holders([port, 1])
        assert (holder["port"], holder["pid"], holder["run"]) == (port, child.pid, None)
        assert holder["user"] == processes.user_name(os.getuid())
        assert "create_server" in holder["command"]
    finally:
        child.communicate(timeout=20)
    assert leftovers.port_holders([port]) == []


def test_field_06_the_holder_of_another_user_is_named_where_root_is_to_be_had(monkeypatch):
    asked = []

    def run(argv):
        asked.append(list(argv))
        return 0, f'LISTEN 0 128 0.0.0.0:29500 0.0.0.0:* users:(("python3",pid={os.getpid()},fd=3))\n', ""

    unseen = processes.ListeningSocket(29500, "0.0.0.0", 0, None)
    monkeypatch.setattr(processes, "port_holders", lambda ports: [unseen])
    monkeypatch.setattr(leftovers.bare, "tool", run)
    (unknown,) = leftovers.port_holders([29500])
    assert (unknown["port"], unknown["pid"], unknown["user"]) == (29500, None, "root")
    (named,) = leftovers.port_holders([29500], ["sudo", "-n"])

    assert named["pid"] == os.getpid()
    assert Path("/proc/self/cmdline").read_text().split("\0")[0] in named["command"]
    assert asked == [["sudo", "-n", "ss", "-Hltnp", "sport", "=", ":29500"]]


def test_field_06_training_processes_are_found_by_mark_and_by_command():
    sleeper = [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"]
    marked = {**os.environ, "NANOCHAT_DDP_SESSION": "session-of-a-test"}
    kinds = [(sleeper, marked), ([*sleeper, "scripts.base_train"], os.environ), (sleeper, os.environ)]
    started = [subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for argv, env in kinds]
    try:
        for child in started:
            assert child.stdout and child.stdout.readline()
        found = {entry["pid"]: entry for entry in leftovers.trainer_processes()}
        assert found[started[0].pid]["session"] == "session-of-a-test"
        assert found[started[1].pid]["session"] is None
        assert started[2].pid not in found
    finally:
        for child in started:
            child.communicate(timeout=20)


def test_everything_of_this_host_within_a_second(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    start = time.monotonic()
    facts = info.host_info("~/x/../base", str(tmp_path / "base/runs/d4"), ports=[1], peers=["localhost"])["probe"]
    seconds = time.monotonic() - start
    assert seconds < 3, "the machine may be busy, but not that busy"
    assert sorted(tmp_path.rglob("*")) == before
    json.dumps(facts)
    assert facts["host"]["hostname"] == socket.gethostname()
    assert any(nic["name"] == "lo" and nic["kind"] == "loopback" for nic in facts["nics"])
    assert facts["run"]["plan_digest"] is None and facts["base_dir"] == str(tmp_path / "base")
    assert 1024 <= facts["ephemeral"]["low"] < facts["ephemeral"]["high"] <= 65535


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
    probe = call(info.host_info, base_dir=str(tmp_path / "base"), peers=["192.0.2.77"], ports=[1])["probe"]
    assert (probe["base_dir"], probe["run"]) == (str(tmp_path / "base"), None)
    assert not (tmp_path / "base").exists()
    assert not any("sudo" in argv[0] and argv[1:] != ["-n", "true"] for argv in commands)
    assert probe["python"]["candidates"] == []
    assert [entry["peer"] for entry in probe["routes"]] == ["192.0.2.77", "default"]
