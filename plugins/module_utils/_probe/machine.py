# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""System, processors, memory, disks and limits, read from the kernel. Read-only."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
from pathlib import PurePosixPath
from typing import NamedTuple, Sequence

from .._contract.probe import Disk, Memory, Processors
from .._kit import bare
from .._kit.ownership import exposure, mount_of
from .network import read

# Instruction sets that make matrix products faster.
FLAGS = ("avx", "avx2", "avx512f", "amx_tile", "asimd", "sve")
CGROUPS = "/sys/fs/cgroup"
# Cores below this fraction of the fastest one's capacity are small.
SMALL = 0.8
COMPILERS = ("cc", "gcc", "clang")  # that the trainer looks for (native.py)
GRAPHICAL = ("x11", "wayland", "mir")
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "glusterfs", "beegfs", "9p", "afs", "sshfs",
)  # fmt: skip


def usage() -> dict[str, list[str]]:
    """Users who are logged in graphically, and whether logind is missing, which tells them."""
    code, sessions, dummy = bare.tool(["loginctl", "list-sessions", "--no-legend"])
    names = [line.split()[0] for line in sessions.splitlines() if line.strip()]
    properties = ["-p%s" % name for name in ("Name", "Class", "Type", "State")]
    told = bare.tool(["loginctl", "show-session", *names, *properties])[1] if names else ""
    blocks = [dict(line.partition("=")[::2] for line in block.splitlines()) for block in re.split(r"\n\s*\n", told)]
    users = [one for one in blocks if one.get("Class", "").startswith("user") and one.get("State") != "closing"]
    graphical = sorted({one["Name"] for one in users if one.get("Type") in GRAPHICAL})
    return {"graphical": graphical, "blind": ["logind"] if code else []}


# Processors. A matrix product is split evenly, so all threads wait for the slowest: small cores and second threads of a core cost more
# than they gain.


class Cpu(NamedTuple):
    """One processor."""

    number: int
    core: tuple[str, str]  # socket and core
    small: bool


def listed(text: str) -> list[int]:
    """The numbers in a list such as 0-7,16."""
    found: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(low), int(high or low) + 1)
    return found


def cpus(allowed: set[int], root: str = "/sys") -> list[Cpu]:
    """The processors that this user may use, and that are online and not isolated."""
    base = os.path.join(root, "devices/system/cpu")
    online = read(os.path.join(base, "online"))
    usable = set(allowed) & set(listed(online)) if online else set(allowed)
    usable = (usable - set(listed(read(os.path.join(base, "isolated"))))) or usable
    small = small_ones(usable, root)
    found = []
    for one in sorted(usable):
        parts = [read(os.path.join(base, f"cpu{one}/topology", name)) for name in ("physical_package_id", "core_id")]
        found.append(Cpu(one, (parts[0], parts[1]) if parts[1] else ("", f"cpu{one}"), one in small))
    return found


def small_ones(usable: set[int], root: str) -> set[int]:
    """Efficiency cores: by Intel's two core types, or by an ARM kernel's capacities."""
    atoms = set(listed(read(os.path.join(root, "devices/cpu_atom/cpus"))))
    if atoms:
        return atoms
    texts = {number: read(os.path.join(root, f"devices/system/cpu/cpu{number}/cpu_capacity")) for number in usable}
    capacity = {number: int(text) for number, text in texts.items() if text.isdigit()}
    most = max(capacity.values(), default=0)
    return {number for number, value in capacity.items() if value < SMALL * most}


def fast_cores(processors: Sequence[Cpu]) -> list[int]:
    """The first processor of every fast core; of every core where all are alike."""
    first: dict[tuple[str, str], int] = {}
    for one in [one for one in processors if not one.small] or processors:
        first.setdefault(one.core, one.number)
    return sorted(first.values())


def cpu() -> Processors:
    text = read("/proc/cpuinfo")
    model = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.*)$", text, re.M)
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    present = set(line.group(1).split()) if line else set()
    allowed = os.sched_getaffinity(0)
    quota, processors = cpu_quota(), cpus(allowed)
    return {
        "model": model.group(1).strip() if model else platform.machine(),
        "flags": [flag for flag in FLAGS if flag in present],
        "available": limited(len(allowed), quota),
        # Second threads of a core do not make matrix products faster.
        "available_physical": limited(len({one.core for one in processors}), quota),
        "allowed": sorted(allowed),
        "fast": fast_cores(processors),
        "load1": os.getloadavg()[0],
        "native_bf16": any(flag in present for flag in NATIVE_BF16),
        "compiler": any(shutil.which(name) for name in COMPILERS),
    }


def limited(count: int, quota: float | None) -> int:
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def cgroup_folders() -> list[str]:
    """The folders of this process's control group and its parents."""
    path = next((line[len("0::") :] for line in read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    inner = PurePosixPath(CGROUPS + path)
    return [str(one) for one in (inner, *inner.parents) if str(one).startswith(CGROUPS)] if path else []


def cpu_quota() -> float | None:
    """The tightest limit of processor time in the control groups, in processors."""
    limits_found = [read(os.path.join(folder, "cpu.max")).split() for folder in cgroup_folders()]
    return min((int(one[0]) / int(one[1]) for one in limits_found if one and one[0].isdigit()), default=None)


def memory() -> Memory:
    """Within the limits of the control groups, whose page cache that can be reclaimed counts as available."""
    sizes = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", sizes.get("MemFree", 0))
    for folder in cgroup_folders():
        limit = read(os.path.join(folder, "memory.max"))
        if limit.isdigit() and int(limit) < total:
            cached = re.search(r"^inactive_file (\d+)", read(os.path.join(folder, "memory.stat")), re.M)
            used = int(read(os.path.join(folder, "memory.current")) or 0) - int(cached.group(1) if cached else 0)
            total, available = int(limit), max(0, min(available, int(limit) - max(0, used)))
    return {"total": total, "available": available}


def disk(path: str, owned: bool = True) -> Disk:
    """Disk space below a path, which need not exist: the nearest existing parent counts. owned: it must be this user's."""
    parent = path
    while not os.path.exists(parent) and os.path.dirname(parent) != parent:
        parent = os.path.dirname(parent)
    fstype, source = mount_of(os.path.realpath(parent))
    facts: Disk = {
        "parent": parent,
        "real_path": os.path.join(os.path.realpath(parent), os.path.relpath(path, parent)).rstrip("/."),
        "device": None,
        "free": 0,
        "writable": False,
        "noexec": False,
        "fstype": fstype,
        "source": source,
        "network": fstype.replace("fuse.", "") in NETWORK_FILE_SYSTEMS,
        "exposed": exposure(path, owned),
    }
    with contextlib.suppress(OSError):
        room = os.statvfs(parent)
        facts["free"] = room.f_bavail * room.f_frsize
        facts["device"] = os.stat(parent).st_dev
        facts["writable"] = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
        # Of Linux alone; a controller looks at its own folder for results, too.
        facts["noexec"] = bool(room.f_flag & getattr(os, "ST_NOEXEC", 0))
    return facts


def limits() -> dict[str, int | None]:
    kinds = {
        "nofile": resource.RLIMIT_NOFILE,
        "nproc": resource.RLIMIT_NPROC,
        "address_space": resource.RLIMIT_AS,
        "file_size": resource.RLIMIT_FSIZE,
        "cpu_seconds": resource.RLIMIT_CPU,
    }
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}
