# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of one host that a plan and the checks before a run need. Everything here only reads."""

from __future__ import annotations

import glob
import os
import platform
import pwd
import re
import resource
import socket
import sys
import time
from typing import Any, Callable, Optional, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import lineage
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import checkpoint_steps
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.files import read_object
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.cores import core_sets, cpus
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.network import (
    Run,
    firewall,
    names_and_routes,
    nics,
    read,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.sources import folder_facts

Find = Callable[[str], Optional[str]]

FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "sve", "sve2", "bf16", "svebf16", "i8mm",
)  # fmt: skip
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "gpfs",
    "glusterfs",
    "beegfs",
    "9p",
    "afs",
    "sshfs",
)
PYTHON_CHECK = (
    "import sys;from importlib.util import find_spec as f;print('%d.%d.%d'%sys.version_info[:3]);"
    "sys.exit(not(f('venv')and f('ensurepip')))"
)
# What the trainer's environment is told by, once it is made and before that; as in _venv.py, which would bring much along.
VENV_STAMP = ".nanochat-ddp.json"
VENV_MARK = ".nanochat-ddp.building"
# Folders of pyenv and uv carry the version of what is in them.
VERSION_IN_PATH = re.compile(r"/(?:cpython-)?3\.(\d+)(?:\.\d+)?[^/]*/bin/")


def probe(
    run: Run,
    find: Find,
    base_dir: str,
    run_dir: str | None = None,
    venv_dir: str | None = None,
    python: str | None = None,
    ports: Sequence[int] = (),
    peers: Sequence[str] = (),
    folders: Sequence[str] = (),
) -> dict[str, Any]:
    """All facts of this host."""
    base = expand(base_dir)
    venv = expand(venv_dir) if venv_dir else os.path.join(base, "venv")
    ip_tool = find("ip")
    interfaces = nics(run, ip_tool)
    names, routes = names_and_routes(peers, interfaces, run, ip_tool)
    rights = sudo(run, find)
    prefix = {"root": [], "passwordless": [find("sudo") or "sudo", "-n"]}.get(rights)
    return {
        "host": host(),
        "python": dict(pythons(run, find, expand(python) if python else None), venv=venv_facts(venv)),
        "cpu": cpu(),
        "memory": memory(),
        "disk": disk(base),
        "nics": interfaces,
        "routes": routes,
        "names": names,
        "firewall": firewall(run, find, prefix),
        "sudo": rights,
        "tmux": tmux(run, find),
        "ports": name_by_root(port_holders(ports), run, find, prefix),
        "processes": trainer_processes(),
        "limits": limits(),
        "security": security(),
        "ephemeral": ephemeral(),
        "gpus": gpus(),
        "base_dir": base,
        "venv_dir": venv,
        "run": run_facts(expand(run_dir)) if run_dir else None,
        "data": data_sets(base),
        "folders": {path: folder_facts(path) for path in folders},
        "measured": json_file(os.path.join(base, "measured.json")),
    }


def expand(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def json_file(path: str) -> dict[str, Any] | None:
    return read_object(path) or None


def user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# The machine


def host() -> dict[str, Any]:
    return {
        "hostname": socket.gethostname(),
        "machine_id": read("/etc/machine-id") or read("/var/lib/dbus/machine-id"),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "network_namespace": link("/proc/self/ns/net"),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "os": os_name(),
        "user": user_of(os.getuid()),
        "uid": os.getuid(),
        "home": os.path.expanduser("~"),
        "time": time.time(),
    }


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def os_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', read("/etc/os-release"), re.M)
    return match.group(1) if match else platform.system()


def cpu(root: str = "/sys/devices/system/cpu") -> dict[str, Any]:
    text = read("/proc/cpuinfo")
    model = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.*)$", text, re.M)
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    present = set(line.group(1).split()) if line else set()
    flags = [flag for flag in FLAGS if flag in present]
    allowed = affinity()
    quota = cpu_quota()
    physical = cores(allowed, root)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "model": model.group(1).strip() if model else platform.machine(),
        "flags": flags,
        "logical": os.cpu_count() or 1,
        "physical": cores(None, root),
        "available": limited(len(allowed), quota),
        "available_physical": limited(physical, quota),
        "allowed": sorted(allowed),
        "sets": core_sets(cpus(allowed, os.path.normpath(os.path.join(root, "../../.."))), quota),
        "load1": load,
        "native_bf16": any(flag in flags for flag in NATIVE_BF16),
    }


def affinity() -> set[int]:
    try:
        return set(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return set(range(os.cpu_count() or 1))


def limited(count: int, quota: float | None) -> int:
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def cores(allowed: set[int] | None, root: str) -> int:
    """Physical cores among the allowed processors; hyper-threads do not make matrix products faster."""
    found = set()
    for folder in glob.glob(os.path.join(root, "cpu[0-9]*")):
        number = int(re.sub(r"\D", "", os.path.basename(folder)))
        if allowed is None or number in allowed:
            topology = os.path.join(folder, "topology")
            core = read(os.path.join(topology, "core_id"))
            if core:
                found.add((read(os.path.join(topology, "physical_package_id")), core))
    return len(found) or len(allowed or affinity())


def cgroup_folders(controller: str) -> list[str]:
    """The folders of this process's control group and its parents, both versions."""
    folders = []
    for line in read("/proc/self/cgroup").splitlines():
        number, names, path = ([*line.split(":", 2), "", ""])[:3]
        if number == "0" and not names:
            base = "/sys/fs/cgroup"
        elif controller in names.split(","):
            base = "/sys/fs/cgroup/" + controller
        else:
            continue
        while True:
            folders.append(os.path.normpath(base + "/" + path))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return folders


def cpu_quota() -> float | None:
    quotas = []
    for folder in cgroup_folders("cpu"):
        fields = read(os.path.join(folder, "cpu.max")).split()
        if not fields:
            fields = [read(os.path.join(folder, "cpu.cfs_quota_us")), read(os.path.join(folder, "cpu.cfs_period_us"))]
        if len(fields) == 2 and all(re.fullmatch(r"\d+", field) for field in fields) and int(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas) if quotas else None


def memory() -> dict[str, Any]:
    sizes = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M)}
    limit, used = memory_limit()
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0))
    if limit is not None:
        available = max(0, min(available, limit - used))
    return {
        "total": total if limit is None else min(total, limit),
        "available": available,
        "swap_total": sizes.get("SwapTotal", 0),
        "swap_free": sizes.get("SwapFree", 0),
        "limit": limit,
    }


def memory_limit() -> tuple[int | None, int]:
    """(the tightest limit of the control groups, what they use already but for reclaimable file pages)."""
    tightest: int | None = None
    used = 0
    for folder in cgroup_folders("memory"):
        for limit_name, use_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = read(os.path.join(folder, limit_name))
            if limit.isdigit() and int(limit) < 1 << 60 and (tightest is None or int(limit) < tightest):
                tightest = int(limit)
                cached = re.search(r"^(?:inactive_file|total_inactive_file) (\d+)", read(folder + "/memory.stat"), re.M)
                in_use = read(os.path.join(folder, use_name))
                used = (int(in_use) if in_use.isdigit() else 0) - (int(cached.group(1)) if cached else 0)
    return tightest, max(0, used)


def disk(path: str) -> dict[str, Any]:
    """The room below a path, which need not exist yet: the nearest parent that does is looked at."""
    parent = path
    while not os.path.exists(parent) and os.path.dirname(parent) != parent:
        parent = os.path.dirname(parent)
    fstype, source = mount_of(os.path.realpath(parent))
    facts = {
        "path": path,
        "parent": parent,
        "real_path": os.path.join(os.path.realpath(parent), os.path.relpath(path, parent)).rstrip("/."),
        "device": None,
        "free": 0,
        "total": 0,
        "writable": False,
        "fstype": fstype,
        "source": source,
        "network": fstype.replace("fuse.", "") in NETWORK_FILE_SYSTEMS,
    }
    try:
        room = os.statvfs(parent)
        facts.update(
            free=room.f_bavail * room.f_frsize,
            total=room.f_blocks * room.f_frsize,
            device=os.stat(parent).st_dev,
            writable=os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK) and not room.f_flag & os.ST_RDONLY,
            noexec=bool(room.f_flag & os.ST_NOEXEC),
        )
    except OSError:
        pass
    return facts


def mount_of(path: str) -> tuple[str, str]:
    """(type, source) of the file system that holds a path."""
    best, found = "", ("", "")
    for line in read("/proc/self/mountinfo").splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split()
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, (right.split()[0], ([*right.split(), ""])[1])
    return found


# Software


def python_paths(find: Find, wanted: str | None) -> list[str]:
    """Interpreters worth asking, each once; pyenv's shims are slow and only lead to others of the list."""
    home = os.path.expanduser("~")
    named = [find("python3.%d" % minor) for minor in (15, 14, 13, 12, 11, 10)] + [find("python3"), sys.executable]
    patterns = (
        home + "/.local/bin/python3.1?",
        home + "/.pyenv/versions/*/bin/python3",
        home + "/.local/share/uv/python/*/bin/python3",
        "/usr/local/bin/python3.1?",
        "/opt/*/bin/python3",
    )
    paths = [wanted] if wanted else []
    paths += [path for path in named if path] + [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    unique: dict[str, str] = {}
    for path in paths:
        version = VERSION_IN_PATH.search(path)
        if "/shims/" not in path and not (version and int(version.group(1)) < 10):
            unique.setdefault(os.path.realpath(path), path)
    return list(unique.values())[:12]


def pythons(run: Run, find: Find, wanted: str | None) -> dict[str, Any]:
    """The interpreter that runs this, those that could make the trainer's environment, and where the library's sources lie."""
    candidates = []
    for path in python_paths(find, wanted):
        code, out, _dummy = run([path, "-I", "-S", "-c", PYTHON_CHECK])
        version = re.match(r"\s*(\d+\.\d+\.\d+)", out)
        if version:
            numbers = tuple(int(part) for part in version.group(1).split("."))
            if numbers >= (3, 10):
                candidates.append({"executable": path, "version": version.group(1), "venv_module": code == 0})
    return {
        "executable": sys.executable,
        "version": "%d.%d.%d" % sys.version_info[:3],
        "candidates": candidates,
        "library": os.path.dirname(os.path.abspath(os.__file__)),
    }


def venv_facts(path: str) -> dict[str, Any]:
    installed = glob.glob(os.path.join(path, "lib", "python3*", "site-packages", "torch-*.dist-info"))
    match = re.search(r"torch-(.+)\.dist-info$", installed[0]) if installed else None
    return {
        "path": path,
        "exists": os.path.exists(os.path.join(path, "bin", "python")),
        "kind": venv_kind(path),
        "torch": match.group(1) if match else None,
        "stamp": json_file(os.path.join(path, VENV_STAMP)),
        "disk": disk(path),
    }


def venv_kind(path: str) -> str:
    """absent, ours (also half-built), foreign (somebody else's environment) or occupied by something else."""
    try:
        names = os.listdir(path)
    except OSError:
        return "occupied" if os.path.lexists(path) else "absent"
    if VENV_STAMP in names or VENV_MARK in names:
        return "ours"
    return "foreign" if "pyvenv.cfg" in names else "occupied" if names else "absent"


def sudo(run: Run, find: Find) -> str:
    if os.geteuid() == 0:
        return "root"
    tool = find("sudo")
    return "passwordless" if tool and run([tool, "-n", "true"])[0] == 0 else "none"


def tmux(run: Run, find: Find) -> dict[str, str | None]:
    path = find("tmux")
    if not path:
        return {"path": None, "version": None}
    _dummy, out, _dummy2 = run([path, "-V"])
    return {"path": path, "version": out.replace("tmux", "").strip() or None}


def limits() -> dict[str, int | None]:
    names = {
        "nofile": "RLIMIT_NOFILE",
        "nproc": "RLIMIT_NPROC",
        "memlock": "RLIMIT_MEMLOCK",
        "address_space": "RLIMIT_AS",
        "file_size": "RLIMIT_FSIZE",
        "cpu_seconds": "RLIMIT_CPU",
    }
    found: dict[str, int | None] = {}
    for name, constant in names.items():
        soft = resource.getrlimit(getattr(resource, constant))[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def security() -> dict[str, str]:
    enforce = read("/sys/fs/selinux/enforce")
    return {
        "selinux": {"1": "enforcing", "0": "permissive"}.get(enforce, "absent"),
        "apparmor": "enabled" if read("/sys/module/apparmor/parameters/enabled") == "Y" else "absent",
        # Under which label this login's processes run; that of a rank is the same.
        "label": (read("/proc/self/attr/apparmor/current") or read("/proc/self/attr/current")).rstrip("\0"),
    }


def ephemeral() -> dict[str, int]:
    """The local ports on which Gloo listens."""
    fields = read("/proc/sys/net/ipv4/ip_local_port_range", "32768 60999").split()
    return {"low": int(fields[0]), "high": int(fields[1])}


def gpus() -> list[dict[str, str]]:
    """NVIDIA's cards as the driver lists them; asking nvidia-smi can take seconds."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:\s*(.*)$", read(path), re.M)
        found.append({"model": model.group(1).strip() if model else "NVIDIA"})
    return found


# Who is there already


TRAINER_COMMAND = re.compile(r"torchrun|torch\.distributed\.(run|launch)|scripts[./]base_train")


def trainer_processes() -> list[dict[str, Any]]:
    """Processes that this collection started, and those that look like a trainer's whoever started them."""
    found = []
    for pid, one in sorted(processes.processes().items()):
        if pid != os.getpid() and (one.marker or TRAINER_COMMAND.search(one.command)):
            found.append(
                {
                    "pid": pid,
                    "parent": one.ppid,
                    "user": one.user,
                    "command": one.command[:300],
                    "session": one.marker,
                    "age": age(one.start),
                }
            )
    return found


def age(start: int) -> int | None:
    """Seconds since a process started, of the clock tick at which it did."""
    uptime = read("/proc/uptime").split()
    return int(float(uptime[0]) - start / os.sysconf("SC_CLK_TCK")) if uptime else None


def port_holders(ports: Sequence[int]) -> list[dict[str, Any]]:
    """Who listens on the given ports, each process once; the user is known also where the process is somebody else's."""
    found: dict[tuple[int, int | None], dict[str, Any]] = {}
    for holder in processes.port_holders(ports):
        entry = found.setdefault(
            (holder.port, holder.pid),
            {
                "port": holder.port,
                "addresses": [],
                "pid": holder.pid,
                "user": holder.user,
                "command": holder.command[:300] if holder.command else None,
                "session": holder.marker,
                "ours": holder.marker is not None,
            },
        )
        entry["addresses"].append(holder.address)
    return list(found.values())


def name_by_root(holders: list[dict[str, Any]], run: Run, find: Find, prefix: list[str] | None) -> list[dict[str, Any]]:
    """The processes of other users that hold a port: only root sees which they are."""
    tool = find("ss")
    for holder in holders:
        if holder["pid"] or not prefix or not tool:
            continue
        dummy, out, _dummy2 = run([*prefix, tool, "-Hltnp", "sport", "=", f":{holder['port']}"])
        match = re.search(r"\bpid=(\d+)", out)
        owner = processes.process(int(match.group(1))) if match else None
        if owner:
            holder.update(pid=owner.pid, command=owner.command[:300])
    return holders


# What earlier runs left


def run_facts(folder: str) -> dict[str, Any]:
    plan = json_file(os.path.join(folder, "plan.json")) or {}
    session = json_file(os.path.join(folder, "session.json"))
    return {
        "path": folder,
        "exists": os.path.isdir(folder),
        "plan_digest": plan.get("digest"),
        "rows": rows_of(plan),
        "cores": cores_of(plan),
        "lineage": lineage.of_plan(plan),
        "session": session,
        "checkpoints": checkpoint_steps(folder),
    }


def rows_of(plan: dict[str, Any]) -> dict[str, int]:
    """The rows of each host under the plan that lies in the run's folder."""
    nodes = plan.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {str(node.get("host")): whole(node.get("rows")) for node in nodes}


def cores_of(plan: dict[str, Any]) -> dict[str, list[int]]:
    """The processors to which that plan pins each host; hosts that it leaves to the kernel are not named."""
    nodes = plan.get("nodes")
    nodes = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
    return {
        str(node.get("host")): [whole(number) for number in node["cores"]]
        for node in nodes
        if isinstance(node.get("cores"), list)
    }


def whole(value: Any) -> int:
    """A number of a file that may hold anything."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def data_sets(base: str) -> list[dict[str, Any]]:
    """The data sets in the store, by their manifests."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(base), "data", "*", "manifest.json"))):
        manifest = json_file(path) or {}
        listed = manifest.get("shards")
        shards = listed if isinstance(listed, list) else []
        found.append(
            {
                "id": manifest.get("id") or os.path.basename(os.path.dirname(path)),
                "shards": len(shards),
                "bytes": sum(whole(shard.get("bytes")) for shard in shards if isinstance(shard, dict)),
            }
        )
    return found
