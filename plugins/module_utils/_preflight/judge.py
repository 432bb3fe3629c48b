# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges probes and tests of the hosts against the plan. Pure functions."""

from __future__ import annotations

from typing import Any, Iterable

from .._contract.findings import Finding, finding
from .._contract.findings_table import ERROR, INFO, WARNING
from .._plan.hosts import is_loopback
from .evidence import PreflightEvidence
from .links import judge_links

ORDER = {ERROR: 0, WARNING: 1, INFO: 2}

LOW_FILES = 256
LOW_PROCESSES = 512
LONG_RUN = 7 * 24 * 3600
# Instruction sets by their benefit for matrix products, the greatest first.
LEVELS = ("amx_tile", "avx512f", "sve", "avx2", "asimd", "avx")


def judge(evidence: PreflightEvidence) -> list[Finding]:
    """All findings, the worst first, without duplicates."""
    found: list[Finding] = list(evidence.plan_findings)
    for host in (node["host"] for node in evidence.plan["nodes"]):
        # The plan's findings name a host that is down.
        for look in (address_names, load, limits, folder) if evidence.probes.get(host) else ():
            found += look(evidence, host)
    for compare in (cpus, all_reduce):
        found += compare(evidence)
    found += judge_links(evidence)
    return in_order(found)


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Without duplicates, errors first, otherwise in order."""
    unique: dict[tuple[Any, ...], Finding] = {}
    for entry in found:
        unique.setdefault((entry["code"], entry["host"], entry["peer"], entry["seen"]), entry)
    return sorted(unique.values(), key=lambda entry: ORDER[entry["severity"]])


# One host


def address_names(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """Names that resolve to the host itself: its own, or worse, a peer's."""
    own = [text for text in evidence.fact(host, "names", "own") or [] if is_loopback(text)]
    alone = is_loopback(evidence.node(host)["address"] or "")
    if own and not alone:
        yield finding(
            "name-is-loopback", host, f"its name {evidence.fact(host, 'host', 'hostname')} resolves to {own[0]}"
        )
    for name, addresses in (evidence.fact(host, "names", "peers") or {}).items():
        looped = [text for text in addresses if is_loopback(text)]
        if looped and not alone:
            seen = f"the name {name} of a peer resolves to {looped[0]}"
            remedy = "Remove that line from /etc/hosts on that host."
            yield finding("name-is-loopback", host, seen, severity=WARNING, remedy=remedy)


def own_session(evidence: PreflightEvidence, host: str) -> Any:
    """This run's session in progress on a host."""
    session = evidence.fact(host, "run", "session") or {}
    return session.get("id") if session.get("ended") is None else None


def first_here(evidence: PreflightEvidence, host: str) -> bool:
    """Whether this is the machine's first node; each machine is reported once."""
    boot = evidence.fact(host, "host", "boot_id")
    hosts = [node["host"] for node in evidence.plan["nodes"]]
    return host == next(one for one in hosts if evidence.fact(one, "host", "boot_id") == boot)


def load(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """Other load on the cores; a run in progress is not."""
    load1, cores = evidence.fact(host, "cpu", "load1"), evidence.fact(host, "cpu", "available")
    if load1 and cores and first_here(evidence, host) and not own_session(evidence, host) and load1 >= max(1.5, cores):
        yield finding("host-busy", host, f"{load1:.1f} processes want to run on {cores} processors")


def limits(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    """User limits that this plan would exceed."""
    node, known = evidence.node(host), evidence.fact(host, "limits") or {}
    files = max(LOW_FILES, 8 * evidence.plan["world"])
    for name, least, seen in (
        ("nofile", files, "{} open files (ulimit -n)"),
        ("nproc", LOW_PROCESSES, "{} processes and threads (ulimit -u)"),
        ("address_space", node["memory_bytes"], "{} bytes of memory (ulimit -v)"),
        ("file_size", node["checkpoint_bytes"], "files of {} bytes, less than a checkpoint (ulimit -f)"),
        ("cpu_seconds", LONG_RUN, "{} seconds of CPU time, after which the kernel kills a process (ulimit -t)"),
    ):
        if known.get(name) is not None and known[name] < least:
            yield finding("ulimit-low", host, seen.format(known[name]))
    logout, user = evidence.fact(host, "logout") or {}, evidence.fact(host, "host", "user")
    if logout.get("kills") and not logout.get("lingers"):
        yield finding("ends-at-logout", host, f"KillUserProcesses=yes, and {user} does not linger")


def folder(evidence: PreflightEvidence, host: str) -> Iterable[Finding]:
    if evidence.fact(host, "disk", "noexec"):
        seen = f"{evidence.fact(host, 'disk', 'parent')} is on a file system mounted with noexec"
        remedy = "Set ddp_venv_dir to a folder on a file system mounted without noexec."
        yield finding("folder-refused", host, seen, remedy=remedy)


# All hosts together


def cpus(evidence: PreflightEvidence) -> Iterable[Finding]:
    """Instruction sets; CPUs with unknown flags are skipped."""
    flags = {host: evidence.fact(host, "cpu", "flags") or [] for host in evidence.probes}
    best = {host: next((one for one in LEVELS if one in known), "") for host, known in flags.items()}
    level = {host: name for host, name in best.items() if name}
    if len(set(level.values())) > 1:
        slowest = max(level, key=lambda host: LEVELS.index(level[host]))
        yield finding("cpu-features-differ", slowest, ", ".join(f"{host} has {name}" for host, name in level.items()))


def all_reduce(evidence: PreflightEvidence) -> Iterable[Finding]:
    """The all-reduce."""
    if evidence.running:
        yield finding("run-in-progress", "", f"the run {evidence.plan['run']} is in progress")
    if any(not evidence.gloo.get(node["host"]) for node in evidence.plan["nodes"]):
        return
    for host, result in evidence.gloo.items():
        if not result.get("ok"):
            yield finding(
                "gloo-failed", host, f"{result.get('phase', 'it')} failed: {result.get('error', 'no answer')}"
            )
