# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The doctor's evidence from files of /proc and /sys as kernels write them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._doctor import gather

MEMINFO = "MemFree:          500000 kB\nMemAvailable:    4000000 kB\n"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Contents of the files; all others are empty."""
    found: dict[str, str] = {}
    monkeypatch.setattr(gather, "read_text", lambda path: found.get(path, ""))
    return found


def counted(at: float, **more: Any) -> gather.Counters:
    return gather.Counters(**{"time": at, "cpu": {}, "throttle": 0, "limited": 0.0, "delay": 0.0, **more})


def test_what_grew_between_two_moments_is_told_by_the_second(files: dict[str, str]) -> None:
    files["/proc/meminfo"] = MEMINFO
    files["/proc/pressure/io"] = "some avg10=42.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=9.00\n"
    files["/proc/vmstat"] = "nr_free_pages 5\noom_kill 3\n"
    before = counted(10.0, throttle=7, limited=1.0)
    told = gather.system_facts("/", before, counted(12.0, throttle=8, limited=1.5))
    assert told["memory_available"] == 4_000_000 * 1024
    assert (told["throttled"], told["limited"]) == (True, 0.25)
    assert told["pressure"] == {"memory": None, "io": 42.5}
    assert told["oom_kills"] == 3
    assert gather.system_facts("/none", before, counted(12.0, throttle=7))["throttled"] is False


def test_counters_are_read_as_the_kernel_writes_them(files: dict[str, str]) -> None:
    files["/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"] = "4\n"
    files["/proc/self/cgroup"] = "0::/user.slice/run.scope\n"
    files["/sys/fs/cgroup/user.slice/run.scope/cpu.stat"] = "nr_throttled 2\nthrottled_usec 2500000\n"
    told = gather.counters(None)
    assert (told.throttle, told.limited, told.delay) == (4, 2.5, 0.0)


def process(pid: int, **more: Any) -> gather.processes.Process:
    return gather.processes.Process(
        **{
            "pid": pid,
            "ppid": 1,
            "uid": 0,
            "start": 5,
            "state": "R",
            "argv": ("ffmpeg", "-i"),
            "name": "ffmpeg",
            **more,
        }
    )


def test_of_the_process_memory_swap_and_use_are_told(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather.processes, "process", process)
    files["/proc/9/status"] = "VmRSS:\t    2048 kB\nThreads:\t3\n"
    files["/proc/9/wchan"] = "tcp_recvmsg\n"
    told = gather.process_facts(9, counted(10.0, cpu={9: 5.0}), counted(12.0, cpu={9: 8.0}, delay=1.0))
    assert told is not None
    assert (told["memory_bytes"], told["swapped_bytes"], told["waits_in"]) == (2**21, 0, "tcp_recvmsg")
    assert told["waits_for_core"] == 0.5
    assert gather.process_facts(None, counted(1.0), counted(2.0)) is None


def test_who_else_computes_is_told_from_a_tenth_of_a_core_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather.processes, "process", lambda pid: process(pid) if pid != 6 else None)
    before = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
    after = {1: 1.3, 2: 1.18, 3: 5.0, 4: 3.0, 5: 900.0, 6: 9.0, 7: 2.0, 8: 1.4}
    told = gather.busiest(counted(10.0, cpu=before), counted(12.0, cpu=after), {3})
    # Not the rank itself (3), not one that has begun meanwhile (5) or ended (6); at most three.
    assert [(one["pid"], one["cpu_share"]) for one in told] == [(4, 1.0), (7, 0.5), (8, 0.2)]
    assert [one["pid"] for one in gather.busiest(counted(10.0, cpu=before), counted(12.0, cpu=after), {3, 4, 7})] == [
        8,
        1,
    ]
    assert told[0]["command"] == "ffmpeg"


def test_the_kernel_is_asked_for_what_it_killed_since_the_run_began() -> None:
    started = time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, -1))
    lines = [
        "2026-05-04T11:59:59,000000+02:00 Out of memory: Killed process 1 (old)",
        "2026-05-04T12:00:01,000000+02:00 Out of memory: Killed process 2 (python)",
        "2026-05-04T12:00:02,000000+02:00 eth0: link up",
    ]
    answers = {"dmesg": (0, "\n".join(lines), ""), "journalctl": (0, "", "")}
    assert gather.kernel_words(lambda argv: answers[argv[0]], started) == [lines[1]]
    # Where dmesg is root's alone, the journal may be read by those of the group adm.
    answers = {"dmesg": (1, lines[2], "Operation not permitted"), "journalctl": (0, lines[1], "")}
    assert gather.kernel_words(lambda argv: answers[argv[0]], started) == [lines[1]]
    assert gather.kernel_words(lambda argv: (1, lines[1], ""), started) == []
