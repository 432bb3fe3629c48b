# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collects a host's evidence about a stuck or dead rank in a few seconds, without changes.

Everything comes from /proc, /sys, the run folder and the trainer's answer to a request for its stacks. Unreadable
parts are left out; the judge (judge.py) works with the rest.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .._contract.document import Document, section, whole, words
from .._kit import bare, processes
from .._kit.files import free_bytes, read_object, read_text
from .._run.polling import busy_share, core_seconds, read_effort
from .._run.state import read_run

if TYPE_CHECKING:
    from .evidence import OtherProcess, RankEvidence, RankProcess, System

# The trainer's heartbeat thread checks for this file every second and answers with its stacks.
REQUEST = "dump-request-rank%d"
ANSWER = "dump-rank%d.json"
ANSWER_SECONDS = 4.0
SAMPLE_SECONDS = 1.0
REACH_SECONDS = 3.0


def doctor_info(
    run_dir: str, rank: int, probe_port: int, peers: Sequence[Mapping[str, str]] = ()
) -> Dict[str, RankEvidence]:
    """All evidence about this host's rank. peers: [{host, address}]; probe_port: one that the peers' firewalls leave open."""
    state = read_run(run_dir, rank, lines=30)
    heartbeat = read_object(os.path.join(run_dir, "heartbeat-rank%d.json" % rank))
    table = processes.processes()
    pid = trainer_pid(run_dir, heartbeat, table)
    ask(run_dir, rank, pid)
    first, before = counters(pid), read_effort(run_dir, rank)
    time.sleep(SAMPLE_SECONDS)
    second, after = counters(pid), read_effort(run_dir, rank)
    state["busy"] = busy_share(before, after)
    # Of the run: also its other nodes on this machine.
    name = "--run=%s" % os.path.basename(run_dir.rstrip("/"))
    ours = {one.pid for one in table.values() if one.worker and name in one.argv} | {os.getpid(), pid or 0}
    return {
        "evidence": {
            "rank": rank,
            "run": state,
            "process": process_facts(pid, first, second),
            "stacks": answer(run_dir, rank, pid),
            "links": reach_all(peers, probe_port),
            "system": system_facts(run_dir, first, second),
            "others": busiest(first, second, ours),
            "kernel": kernel_words(bare.tool, state["started"]),
            "oom_kills_before": whole(heartbeat, "oom_kills"),
        }
    }


# -- the trainer's process --------------------------------------------------------------------------------------------


def trainer_pid(run_dir: str, heartbeat: Document, table: Mapping[int, processes.Process]) -> Optional[int]:
    """The rank's process: the one with the heartbeat, or else its session's deepest one; None if gone."""
    marker = read_object(os.path.join(run_dir, "session.json")).get("id")
    ours = [one for one in table.values() if marker and one.marker == marker]
    beating = heartbeat.get("pid")
    if isinstance(beating, int) and beating in ({one.pid for one in ours} if marker else table):
        return beating
    return max((one.pid for one in ours if one.worker), default=None)


class Counters(NamedTuple):
    """Counters to read twice and compare."""

    time: float
    cpu: Dict[int, float]  # seconds by process
    throttle: int  # how often any core was thermally throttled
    limited: float
    delay: float  # seconds that the rank's threads were ready to run without a core


def counters(pid: Optional[int]) -> Counters:
    """Read them now."""
    delay = sum(waited for dummy, waited in core_seconds(pid)) if pid else 0.0
    cpu = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = read_text("/proc/%s/stat" % name).rpartition(")")[2].split()
        if len(fields) > 12:
            cpu[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    folders = glob.glob("/sys/devices/system/cpu/cpu[0-9]*")
    throttle = sum(int(read_text(folder + "/thermal_throttle/core_throttle_count") or 0) for folder in folders)
    return Counters(time.monotonic(), cpu, throttle, _limited(), delay)


def figure(path: str, pattern: str) -> Optional[float]:
    """The number in a file of the kernel's; None if it has none."""
    found = re.search(pattern, read_text(path), re.M)
    return float(found.group(1)) if found else None


def process_facts(pid: Optional[int], first: Counters, second: Counters) -> Optional[RankProcess]:
    """State and memory of the rank's process, and how long it waited for a core; None if there is none."""
    one = processes.process(pid) if pid else None
    if one is None or pid is None:
        return None
    seconds, status = second.time - first.time, "/proc/%d/status" % pid
    return {
        "pid": pid,
        "state": one.state,
        "waits_for_core": round(max(0.0, second.delay - first.delay) / seconds, 3),
        "memory_bytes": int(figure(status, r"^VmRSS:\s+(\d+) kB") or 0) * 1024,
        "swapped_bytes": int(figure(status, r"^VmSwap:\s+(\d+) kB") or 0) * 1024,
        "waits_in": read_text("/proc/%d/wchan" % pid).strip(),
    }


# -- stacks, from the trainer -------------------------------------------------------------------------------------------


def ask(run_dir: str, rank: int, pid: Optional[int]) -> None:
    """Write the request; an unwritable folder just gets no answer."""
    if pid is not None:
        with contextlib.suppress(OSError), open(os.path.join(run_dir, REQUEST % rank), "w", encoding="ascii") as file:
            file.write(str(time.time()))


def answer(run_dir: str, rank: int, pid: Optional[int]) -> Dict[str, List[str]]:
    """The trainer's answer, empty if it does not come, as of a stopped process."""
    request, path = os.path.join(run_dir, REQUEST % rank), os.path.join(run_dir, ANSWER % rank)
    limit = time.monotonic() + (ANSWER_SECONDS if pid is not None else 0.0)
    while os.path.exists(request) and time.monotonic() < limit:
        time.sleep(0.1)
    answered = not os.path.exists(request)
    with contextlib.suppress(OSError):  # it was answered, or never written
        os.unlink(request)
    stacks = section(read_object(path), "stacks") if answered else {}
    return {thread: words(stacks, thread) for thread in stacks}


# -- the network ------------------------------------------------------------------------------------------------------


def reach_all(peers: Sequence[Mapping[str, str]], port: int) -> Dict[str, str]:
    """Test all peers in parallel, so that ten unresponsive ones take no longer than one."""
    with ThreadPoolExecutor(max_workers=len(peers) or 1) as pool:
        answers = pool.map(lambda peer: reach(peer["address"], port), peers)
        return dict(zip([peer["host"] for peer in peers], answers))


def reach(address: str, port: int) -> str:
    """Whether packets reach the peer and come back: open and refused both prove it."""
    try:
        socket.create_connection((address, port), REACH_SECONDS).close()
    except ConnectionRefusedError:
        return "refused"
    except (socket.timeout, TimeoutError):
        return "timeout"
    except OSError as error:
        return "no route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else str(error.strerror)
    return "open"


# -- the machine ------------------------------------------------------------------------------------------------------


def system_facts(run_dir: str, first: Counters, second: Counters) -> System:
    """Load, memory, disk, throttling and the state of the network interfaces."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text("/proc/meminfo"), re.M))
    seconds = second.time - first.time
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load1": os.getloadavg()[0],
        "memory_available": int(memory.get("MemAvailable", 0)) * 1024,
        "disk_free": free_bytes(run_dir),
        "throttled": second.throttle > first.throttle,
        "limited": round((second.limited - first.limited) / seconds, 2),
        "pressure": {name: figure("/proc/pressure/" + name, r"^some avg10=([\d.]+)") for name in ("memory", "io")},
        "oom_kills": int(figure("/proc/vmstat", r"^oom_kill (\d+)") or 0),
        "nics": {os.path.basename(nic): read_text(nic + "/operstate").strip() for nic in glob.glob("/sys/class/net/*")},
    }


def _limited() -> float:
    """Seconds that this control group's CPU limit kept its processes waiting."""
    group = read_text("/proc/self/cgroup").strip().rpartition("::")[2].rstrip("/")
    for path in ("/sys/fs/cgroup%s/cpu.stat" % group, "/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        found = re.search(r"^throttled_(usec|time) (\d+)", read_text(path), re.M)
        if found:
            return int(found.group(2)) / (1e6 if found.group(1) == "usec" else 1e9)
    return 0.0


def busiest(first: Counters, second: Counters, own: Set[int]) -> List[OtherProcess]:
    """The three other processes that use most CPU, from a tenth of a core on."""
    seconds = second.time - first.time
    shares = [(used - first.cpu.get(pid, used)) / seconds for pid, used in second.cpu.items()]
    ranked = sorted(zip(shares, second.cpu), reverse=True)
    found: List[OtherProcess] = []
    for share, pid in ranked:
        one = processes.process(pid) if share >= 0.1 and pid not in own else None
        if one is not None:
            found.append({"pid": pid, "user": one.user, "command": one.name, "cpu_share": round(share, 2)})
    return found[:3]


def kernel_words(run: Callable[[List[str]], Tuple[int, str, str]], started: Optional[float]) -> List[str]:
    """The kernel's messages about OOM kills since the run started, if this user may read them."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started or 0))
    for argv in (
        ["dmesg", "--time-format", "iso"],
        ["journalctl", "-k", "-q", "--no-pager", "-n", "2000", "-o", "short-iso"],
    ):
        code, out, dummy = run(argv)
        if code == 0:
            found = [line[:300] for line in out.splitlines() if line >= since]
            return [line for line in found if re.search(r"out of memory|oom-kill|Killed process", line, re.I)][-5:]
    return []
