# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes

LISTEN, ESTABLISHED = "0A", "01"


class Proc:
    """A folder that looks like /proc."""

    def __init__(self, folder):
        self.folder = folder
        self.path = str(folder)
        (folder / "net").mkdir()

    def add(self, pid, ppid=1, uid=1000, start=500, state="S", name="python", argv=(b"python",), environ=b"", fds=()):
        folder = self.folder / str(pid)
        (folder / "fd").mkdir(parents=True)
        rest = f"{state} {ppid} " + " ".join(["0"] * 17) + f" {start} 0 0\n"
        (folder / "stat").write_text(f"{pid} ({name}) {rest}")
        (folder / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (folder / "cmdline").write_bytes(b"".join(word + b"\0" for word in argv))
        (folder / "environ").write_bytes(environ)
        for number, target in enumerate(fds):
            (folder / "fd" / str(number)).symlink_to(target)
        return folder

    def sockets(self, name, *rows):
        lines = ["  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"]
        for address, port, state, uid, inode in rows:
            lines.append(f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:0 0 {uid} 0 {inode} 1")
        (self.folder / "net" / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_reads_a_process_whose_name_looks_like_its_other_fields(proc):
    environ = b"A=NANOCHAT_DDP_SESSION=no\0NANOCHAT_DDP_SESSION=0a1b\0TORCHELASTIC_RUN_ID=none\0"
    proc.add(7, ppid=3, start=99, name="a) R 1 (b", argv=(b"python", b"-c", b"x\xff y"), environ=environ)

    found = processes.process(7, proc.path)

    assert found == processes.Process(7, 3, 1000, 99, "S", ("python", "-c", "x\udcff y"), "a) R 1 (b", "0a1b", True)
    assert found.command == "python -c x\udcff y"


@pytest.mark.parametrize("missing", ["stat", "status", "cmdline", "environ"])
def test_a_process_that_ends_while_it_is_read_is_left_out_and_one_of_others_has_no_marker(proc, missing):
    (proc.add(7) / missing).unlink()
    proc.add(8)
    found = processes.processes(proc.path)
    assert sorted(found) == ([7, 8] if missing == "environ" else [8])
    assert {(one.marker, one.worker) for one in found.values()} == {(None, False)}


def test_a_forked_rank_is_known_by_the_name_that_the_trainer_gives_it(proc):
    """It has the environment of its parent, which is no rank."""
    trainer = Path(__file__).resolve().parents[5] / "trainer/nanochat/kit/common.py"
    assert f'RANK_NAME = "{processes.RANK_NAME}"' in trainer.read_text(encoding="utf-8")
    for pid, name in [(7, "python"), (8, processes.RANK_NAME)]:
        proc.add(pid, name=name, argv=(b"python", b"-m", b"scripts.preloaded"), environ=b"NANOCHAT_DDP_SESSION=ab\0")
    assert {pid: one.worker for pid, one in processes.processes(proc.path).items()} == {7: False, 8: True}


@pytest.mark.parametrize(
    ("pid", "start", "state", "lives"),
    [(7, 99, "S", True), (7, 98, "S", False), (7, 99, "Z", False), (9, 99, "S", False)],
)
def test_alive_means_the_same_process_and_no_zombie(proc, pid, start, state, lives):
    proc.add(7, start=99, state=state)
    assert processes.alive(pid, start, proc.path) is lives


def test_descendants_are_found_through_all_generations(proc):
    for pid, ppid in [(1, 0), (10, 1), (11, 10), (12, 11), (13, 11), (20, 1), (21, 20)]:
        proc.add(pid, ppid)
    proc.add(2, name="kworker/0:1", argv=())
    table = processes.processes(proc.path)

    assert table[2].command == "[kworker/0:1]"
    parents = processes.parents_of_all(proc.path)
    assert parents == {pid: one.ppid for pid, one in table.items()}
    assert processes.descendants(parents, [10]) == {11, 12, 13}
    assert processes.descendants(parents, [13, 20]) == {21}


def test_field_06_whoever_holds_a_port_is_named(proc):
    proc.sockets("tcp", ("0100007F", 29500, LISTEN, 1000, 77), ("0100007F", 29500, ESTABLISHED, 1000, 78))
    proc.sockets("tcp6", ("00000000000000000000000000000000", 29500, LISTEN, 4242, 79))
    proc.add(
        30,
        argv=(b"torchrun", b"--nnodes=2"),
        fds=["/dev/null", "socket:[77]"],
        environ=b"NANOCHAT_DDP_SESSION=ab\0NANOCHAT_BASE_DIR=/x/d4\0",
    )
    proc.add(31, ppid=30, fds=["socket:[77]"])

    v4, v6 = sorted(processes.port_holders([29500, 29501], proc.path), key=lambda holder: -holder.address.count("."))

    assert v4[:3] == (29500, "127.0.0.1", 1000)
    assert (v4.process.pid, v4.process.command) == (30, "torchrun --nnodes=2")
    assert (v4.process.marker, v4.process.run) == ("ab", "d4")
    # Another user's process cannot be inspected, but the kernel still names its owner.
    assert v6 == (29500, "::", 4242, None)


@pytest.mark.parametrize(
    ("argv", "run"),
    [
        (("python", "-m", "scripts.base_train", "--depth=4", "--run=books"), "books"),
        (("/x/python", "-B", "/home/anna/nanochat-ddp/runs/books/.keeper/keeper.py"), "books"),
        (("python", "-m", "other", "--run=books"), None),
    ],
)
def test_the_run_of_another_users_process_is_told_by_its_command_line(proc, argv, run):
    proc.add(30, argv=[word.encode() for word in argv])
    assert processes.process(30, proc.path).run == run


def test_the_live_runs_are_those_of_marked_processes_and_of_keepers(proc):
    proc.add(11, environ=b"NANOCHAT_DDP_SESSION=x\0NANOCHAT_BASE_DIR=/srv/runs/d4\0")
    proc.add(12, environ=b"NANOCHAT_BASE_DIR=/srv/runs/d8\0")
    (proc.add(13, argv=(b"python", b"/srv/runs/d9/.keeper/keeper.py")) / "environ").unlink()
    assert processes.live_runs(proc.path) == {"d4", "d9"}
