# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Problems of a plan with the hosts as they are now: full disks, taken ports, missing tools."""

from __future__ import annotations

import re
from typing import Iterator, Mapping, Sequence, Union

from .._contract import lineage
from .._contract.findings import Finding, finding
from .._contract.findings_table import INFO, WARNING
from .._contract.plan import Node, Plan, open_ports
from .._contract.politeness import GUEST
from .._contract.probe import PortHolder, TrainingProcess
from .._contract.settings_table import AUTO
from .._contract.versions import MADE_PYTHON, VENV_BYTES
from .._kit.ownership import WITHOUT_MODES
from .._kit.processes import is_check
from .._kit.words import bytes_text, plain_reason, plural
from .hosts import Host, made_python, neighbours, pythons, same_machine, same_network_stack

ARCHITECTURES = ("x86_64", "aarch64")
# Memory that the system needs to stay alive.
MEMORY_SHARE = 0.92
CLOSE_IT = "Type this command there, or set it to a folder that only this user can write to."
ANOTHER_DISK = "Nothing there can be kept from the other users of that host; if it has any, use a disk of Linux."
LONGEST_COMMAND = 90
MOST_NAMED = 3
Process = Union[PortHolder, TrainingProcess]


def check_hosts(hosts: Sequence[Host], plan: Plan) -> Iterator[Finding]:
    """Problems that prevent a start, and other remarks."""
    nodes = {node["host"]: node for node in plan["nodes"]}
    for host in hosts:
        if not host.probe:
            yield unseen(host, hosts)
            continue
        node = nodes[host.name]
        yield from tools(host, node, plan["trainer"]["python"])
        yield from folder(host, node, hosts)
        yield from environment(host, node, plan["trainer"]["torch"])
        yield from ports(host, node, plan)
        yield from remarks(host, node, hosts, nodes)
    kinds = {host.name: str(host.fact("host", "arch")) for host in hosts if host.probe}
    if len(set(kinds.values())) > 1:
        each = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        seen = f"{each}: they round differently, so the ranks' weights would diverge"
        yield finding("architecture-differs", next(iter(kinds), ""), seen)
    wanting = [host for host in hosts if nodes[host.name]["flags"].get("kernels") == AUTO]
    if bare := [host.name for host in wanting if host.fact("cpu", "compiler") is False]:
        yield finding("no-compiler", ", ".join(bare), "none of cc, gcc and clang is in the PATH")
    for host in hosts:
        if host.polite == GUEST and host.fact("usage", "blind"):
            seen = f"{host.name} has no logind, so somebody at its screen never makes it leave"
            yield finding("guest-blind", host.name, seen)


def unseen(host: Host, hosts: Sequence[Host]) -> Finding:
    """A host without a probe: how to reach it, and how to train without it for now."""
    error, seen = host.error, f"{host.name} cannot be examined"
    remedy = "Check that it is on and that ssh to it works with the inventory's settings."
    if re.search(r"Host key verification failed|host key is known|REMOTE HOST IDENTIFICATION HAS CHANGED", error):
        key = "is not the one that this user knows" if "CHANGED" in error else "is unknown to this user"
        login = host.login or "ssh USER@HOST"
        remedy = f"Its ssh host key {key}. Log in once by ssh from here ({login}), and compare the key."
    elif re.search(
        r"interpreter.* not found|interpreters found|python\S*: No such file|(command|python\S*:) not found", error
    ):
        remedy = "Install Python there (sudo apt-get install python3), or set ansible_python_interpreter of that host."
    if there := [other.name for other in hosts if other.probe]:
        again = "train.yml without that lets it take part again when it is back"
        remedy += f" Or leave it out for now: -e target={','.join(there)}; {again}."
    return finding("host-down", host.name, f"{seen} ({plain_reason(error)})" if error else seen, remedy=remedy)


def tools(host: Host, node: Node, oldest: str) -> Iterator[Finding]:
    """Whether the machine, its programs and its Python allow training."""
    arch = host.fact("host", "arch")
    if arch not in ARCHITECTURES:
        seen = f"{host.name} is a machine of type {arch}, which PyTorch does not support"
        yield finding("architecture-differs", host.name, seen)
    if not host.fact("tmux", "path"):
        yield finding("no-tmux", host.name, f"{host.name} has no tmux, which training needs")
    usable, wanted = pythons(host), host.settings.python
    if wanted and node["python"] not in usable:
        have = ", ".join(usable) or "none"
        seen = f"ddp_python is {wanted} on {host.name}, which is not a Python {oldest} or newer; available: {have}"
        yield finding("python-too-old", host.name, seen)
    elif not node["python"] and not host.fact("python", "venv", "exists"):
        own = host.fact("python", "version")
        seen = f"{host.name} has no Python of {oldest} or newer (its own is {own}), which the trainer needs"
        yield finding("python-too-old", host.name, seen)


def folder(host: Host, node: Node, hosts: Sequence[Host]) -> Iterator[Finding]:
    """Whether the base folder can be written, has room, and belongs to this node alone."""
    disk, base = host.probe["disk"], node["base_dir"]
    here = f"ddp_base_dir is {base} on {host.name}, but"
    if not disk["writable"]:
        seen = f"{here} {host.fact('host', 'user')} cannot write to {disk['parent']} there"
        yield finding("folder-refused", host.name, seen)
    if disk.get("exposed"):
        yield finding("folder-refused", host.name, f"{here} {disk['exposed']}", remedy=CLOSE_IT)
    sharing = [other for other in hosts if same_machine(host, other) and other.fact("disk", "device") == disk["device"]]
    # What is there already needs no room.
    venv = host.fact("python", "venv") or {}
    elsewhere = venv.get("disk", {}).get("device", disk["device"]) != disk["device"]
    need = node["disk_bytes"] + (0 if venv.get("exists") or elsewhere else VENV_BYTES)
    need -= sum(entry["bytes"] for entry in host.fact("data") or [] if f"/{entry['id']}" in node["data_dir"])
    need -= len(host.fact("run", "checkpoints") or []) * node["checkpoint_bytes"]
    need = max(0, need) * len(sharing)
    if disk["writable"] and need > disk["free"]:
        among = f" for {len(sharing)} nodes" if len(sharing) > 1 else ""
        seen = (
            f"{host.name} has {bytes_text(disk['free'])} free below {disk['parent']}, but checkpoints, data and software need about "
            f"{bytes_text(need)}{among}"
        )
        yield finding("disk-short", host.name, seen)
    for other in hosts:
        if other.name >= host.name or not other.probe or other.probe["disk"]["real_path"] != disk["real_path"]:
            continue
        on_one, its = same_machine(host, other), other.probe["disk"]
        if its["device"] == disk["device"] if on_one else disk["network"] and its["source"] == disk["source"]:
            where = f"both see the same folder {base} on {disk['source']}"
            if on_one:
                where = f"both nodes run on one machine and use {base}"
            seen = f"ddp_base_dir of {other.name} and {host.name}: {where}, so they would overwrite each other's files"
            remedy = "Give each its own, for example by including {{ inventory_hostname }}."
            yield finding("folder-refused", host.name, seen, remedy=remedy)


def environment(host: Host, node: Node, torch: str) -> Iterator[Finding]:
    """Whether the trainer's environment exists or can be created."""
    venv = host.fact("python", "venv") or {}
    room, has, problem = venv.get("disk") or {}, str(venv.get("torch") or ""), ""
    if venv.get("kind") == "occupied":
        problem = "which exists and is not a virtual environment, so it would not be changed"
    # If none is visible it may come from elsewhere, by a .pth file or the system; the step that needs it will tell.
    elif venv.get("kind") == "foreign" and has and has.split("+", 1)[0] != torch.split("+", 1)[0]:
        problem = f"a virtual environment that this collection did not create and will not change; it has torch {has} instead of {torch}"
    elif room.get("exposed"):
        problem = f"but {room['exposed']}"
    elif venv.get("exists") or not room or node["venv_dir"].startswith(node["base_dir"] + "/"):
        return
    elif not room["writable"]:
        problem = f"but {host.fact('host', 'user')} cannot write to {room['parent']}"
    elif room["device"] != host.fact("disk", "device") and room["free"] < VENV_BYTES:
        free, need = bytes_text(room["free"]), bytes_text(VENV_BYTES)
        problem = f"with {free} free, but the trainer's packages need about {need}"
    if problem:
        seen = f"ddp_venv_dir is {node['venv_dir']} on {host.name}, {problem}"
        yield finding("venv-refused", host.name, seen)


def ports(host: Host, node: Node, plan: Plan) -> Iterator[Finding]:
    """Findings about foreign processes on the rendezvous port (on the master) or a keeper's port."""
    wanted = open_ports(plan, node)
    for holder in host.fact("ports") or []:
        port, is_test = holder["port"], is_check(holder.get("command"))
        is_own = holder.get("session") and holder["session"] == host.fact("run", "session", "id")
        # A start waits for tests of this user that still run there, or ends them.
        if port not in wanted or is_own or (is_test and holder.get("user") == host.fact("host", "user")):
            continue
        name = "ddp_port" if port == plan["master"]["port"] else "ddp_keeper_port"
        remedy, pid = f"choose another port: -e {name}={port + 10}", holder.get("pid")
        if is_test:
            remedy = f"Another controller is testing connections there. Try again when it has finished, or {remedy}"
        elif holder.get("session") or holder.get("run"):  # of ours
            remedy = f"{how_to_stop(holder)}; or {remedy}"
        elif pid:
            remedy = f"On {host.name}: kill {pid} if nobody needs it, or {remedy}"
        seen = f"{name} {port} is taken on {host.name}: {described(holder)}"
        yield finding("port-held", host.name, seen, remedy=remedy[0].upper() + remedy[1:])


def remarks(host: Host, node: Node, hosts: Sequence[Host], nodes: Mapping[str, Node]) -> Iterator[Finding]:
    """Findings about a machine, most once for all of its nodes."""
    fstype = host.fact("disk", "fstype")
    if fstype in WITHOUT_MODES:
        seen = (
            f"ddp_base_dir is {node['base_dir']} on {host.name}, on a file system ({fstype}) without owners and modes"
        )
        yield finding("folder-refused", host.name, seen, severity=WARNING, remedy=ANOTHER_DISK)
    here = [other for other in hosts if other.name == host.name or same_network_stack(host, other)]
    if here[0].name != host.name:
        return
    if node["python"] == made_python(node["base_dir"]) and node["python"] not in pythons(host):
        lacks = f"{host.name} has no Python 3.10 or newer of its own (it has {host.fact('python', 'version')})"
        how = f"uv installs {MADE_PYTHON} once below {node['base_dir']}/python, downloading about 35 MB from GitHub"
        yield finding("python-made", host.name, f"{lacks}: {how}")
    reached = [f"{other.name} (reached at {other.reach})" for other in here if other.reach]
    if len(reached) > 1:
        yield finding("one-machine-twice", host.name, f"{' and '.join(reached)} are one machine")
    threads, cores = sum(nodes[other.name]["threads"] for other in here), host.fact("cpu", "available_physical")
    processors, is_asked = host.fact("cpu", "available") or threads, any(other.settings.threads for other in here)
    if threads > processors or (is_asked and threads > (cores or processors)):
        seen = f"{threads} threads on {plural(cores or processors, 'core')}, shown as {plural(processors, 'processor')}"
        yield finding("threads-over-cores", host.name, seen, severity=None if threads > processors else INFO)
    ours = {other.fact("run", "session", "id") for other in here} - {None}
    processes = host.fact("processes") or []
    total, free = (host.fact("memory", which) or 0 for which in ("total", "available"))
    count = neighbours(host, hosts)
    need = node["memory_bytes"] * count
    needs = f"{f'{count} nodes there need' if count > 1 else 'its rank needs'} about {bytes_text(need)}"
    if need > total * MEMORY_SHARE:
        yield finding("memory-short", host.name, f"{host.name} has {bytes_text(total)} of memory, but {needs}")
    elif need > free and not ours & {process.get("session") for process in processes}:
        seen = f"{bytes_text(free)} of memory are free on {host.name}, but {needs}"
        yield finding("memory-short", host.name, seen, severity=WARNING)
    yield from other_processes(host, here)


def lost_checkpoints(hosts: Sequence[Host], plan: Plan) -> Iterator[Finding]:
    """Existing checkpoints that this plan cannot resume from: a start would set them aside."""
    by_reason: dict[str, list[str]] = {}
    for host in hosts:
        steps = host.fact("run", "checkpoints") or []
        found = lineage.differences(host.fact("run", "lineage") or {}, plan) if steps else []
        if found:
            by_reason.setdefault(", ".join(found), []).append(f"step {max(steps)} on {host.name}")
    for why, where in by_reason.items():
        seen = f"The run {plan['run']} has checkpoints ({', '.join(where)}) that training cannot resume from: {why}"
        yield finding("checkpoints-lost", plan["master"]["host"], seen)


# Processes of others


def other_processes(host: Host, here: Sequence[Host]) -> Iterator[Finding]:
    """Ranks of this user's other sessions that lost their parent, and trainings of others, on the machine of these nodes."""
    processes, user = host.fact("processes") or [], host.fact("host", "user")
    sessions = [other.fact("run", "session") or {} for other in here]
    running = [one.get("id") for one in sessions if one.get("ended") is None]
    stale = [
        one
        for one in processes
        if one.get("session") and one["session"] not in running and one.get("parent") == 1 and one.get("user") == user
    ]
    for one in stale[:MOST_NAMED]:
        yield finding("stale-ranks", host.name, f"process {one['pid']} of {one['user']}: {one['command'][:100]}")
    ours = {one.get("id") for one in sessions} - {None}
    strangers = [one for one in processes if one.get("session") not in ours]
    pids = {one["pid"] for one in strangers}
    top = [one for one in strangers if one.get("parent") not in pids and one not in stale]
    if top:
        seen = dict.fromkeys(described(one) for one in top[:MOST_NAMED])
        stops = dict.fromkeys(how_to_stop(one) for one in top)
        are_ours = all(one.get("session") or one.get("run") for one in top)
        remedy = f"{'. '.join(stops)}; or wait until it ends." if are_ours else None
        yield finding("other-training", host.name, ", ".join(seen), remedy=remedy)


def described(process: Process) -> str:
    """A process as text: its run if known, or its command."""
    if process.get("run"):
        return f"the run {process['run']} of {process['user']} trains there (process {process['pid']})"
    if not process["pid"]:
        return f"a process of {process['user'] or 'another user'}, which this user may not inspect"
    return f"process {process['pid']} of {process['user']} ({(process['command'] or '')[:LONGEST_COMMAND]})"


def how_to_stop(process: Process) -> str:
    run = process.get("run") or "NAME"
    return f"Stop it as {process['user']}: ansible-playbook nanochat.ddp.stop -i INVENTORY -e ddp_run={run}"
