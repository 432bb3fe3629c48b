# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges all preflight results, once, on the controller; the reasoning is in module_utils/_preflight/judge.py."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.utils.display import Display

from ...module_utils._contract.decode import decode
from ...module_utils._contract.findings import Finding, finding
from ...module_utils._contract.findings_table import ERROR, INFO
from ...module_utils._contract.plan import Plan
from ...module_utils._contract.validate import InvalidHostData
from ...module_utils._kit.printable import printable
from ...module_utils._plan.matmul_precision import speeds_together, with_precision
from ...module_utils._plan.step_model import Link, speeds_of
from ...module_utils._preflight.evidence import PreflightEvidence, named_links
from ...module_utils._preflight.judge import in_order, judge, load
from ...module_utils._preflight.measured import last_object, slowest_link
from ...module_utils._preflight.peer_check import LinkTry
from ...module_utils._preflight.predict import Outlook, advice, outlook, prediction_text
from ...module_utils._preflight.text import links_text, summary
from .._configuration import display_is_ours
from .._display.texts import finding_text
from .evidence import OF_PLAN, SHOWN, JudgeTask, Options, keep

display = Display()


OPTIONS: Options = {
    **OF_PLAN,
    "probes": {"type": "dict", "default": {}},
    "plan_findings": {"type": "list", "elements": "dict", "default": []},
    "before_network": {"type": "bool", "default": False},
    "rehearsal": {"type": "bool", "default": False},
    "running": {"type": "bool", "default": False},
    "show": {"type": "str", "choices": SHOWN, "default": "text"},
    "file": {"type": "path"},
}


def judge_preflight(task: JudgeTask) -> dict[str, object]:
    """Findings, prediction and links; fails if the run must not start."""
    options = task.options
    seen = options["evidence"]
    evidence = gather(options)
    findings = in_order(
        [*judge(evidence), *missing(evidence.plan, seen), *unmeasured(evidence.plan, seen), *unbuilt(evidence, seen)]
    )
    predicted = predicted_by(evidence, seen)
    if predicted:
        findings = in_order([*findings, *advice(evidence.plan, predicted)])
    links = links_of(evidence)
    document = {"run": evidence.plan["run"], "findings": findings, "prediction": predicted, "links": links}
    show(options["show"], evidence, document)
    # Stored for comparison with the actual run.
    keep(None if task.check else options["file"], document, "The findings")
    stopping = [one for one in findings if one["severity"] == ERROR]
    said = {"msg": summary(stopping)} if stopping else {}
    return {**document, "failed": bool(stopping), **said}


def show(how: str, evidence: PreflightEvidence, document: Mapping[str, Any]) -> None:
    """Print a table for people, or JSON for programs."""
    if how == "json":
        display.display(json.dumps(document, indent=2))
    elif how == "text":
        # The collection's display shows each result's findings by itself.
        told = display_is_ours()
        # The rehearsal follows a preflight, which has shown them.
        parts = [
            "" if evidence.rehearsal else links_text(evidence),
            "" if told else "\n".join(map(finding_text, document["findings"])) or "Preflight found no problems.",
        ]
        if document["prediction"]:
            parts.append(fitted(prediction_text(evidence.plan, document["prediction"])))
        text = "\n\n".join(part for part in parts if part)
        if text:
            display.display(printable(text) + "\n")


def fitted(text: str) -> str:
    """Its lines, two columns shorter than 80, since the display indents them."""
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, 78, subsequent_indent="    "))


def gather(options: Mapping[str, Any]) -> PreflightEvidence:
    """The evidence of every host, as input of the judgement."""
    plan, seen = options["plan"], options["evidence"]
    hosts = [node["host"] for node in plan["nodes"]]
    tries = {host: host_tries(piece(seen, host, "answering"), piece(seen, host, "links")) for host in hosts}
    tries = {host: entry for host, entry in tries.items() if entry}
    for host in tries:
        tries[host]["links"] = named_links(plan, tries, host)
    firewalls = {host: piece(seen, host, "firewall") for host in hosts}
    return PreflightEvidence(
        plan=plan,
        probes={host: options["probes"].get(host) or {} for host in hosts},
        tries=tries,
        firewalls={host: firewall for host, firewall in firewalls.items() if "commands" in firewall},
        gloo={host: found for host in hosts if (found := program_answer(piece(seen, host, "gloo")))},
        manifests={host: manifest_digest(piece(seen, host, "manifest")) for host in hosts},
        files={host: wrong_files(piece(seen, host, "files")) for host in hosts},
        plan_findings=options["plan_findings"],
        before_network=options["before_network"],
        rehearsal=options["rehearsal"],
        running=options["running"],
    )


def piece(seen: Mapping[str, Any], host: str, name: str) -> Mapping[str, Any]:
    """One piece of a host's evidence; empty if it was not tried, which `missing` checks."""
    found = (seen.get(host) or {}).get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def missing(plan: Plan, seen: Mapping[str, Any]) -> list[Finding]:
    """Findings about evidence that some hosts have and others lack: a missing check is not a passed check."""
    tried_anywhere = {name for pieces in seen.values() for name in pieces or {}}
    found = []
    for host in (node["host"] for node in plan["nodes"]):
        lacking = sorted(tried_anywhere - set(seen.get(host) or {}))
        if lacking:
            text = f"{host} returned nothing about: {', '.join(lacking)}"
            found.append(finding("evidence-missing", host, text, facts={"pieces": lacking}))
    return found


def host_tries(answering: Mapping[str, Any], links: Mapping[str, Any]) -> dict[str, object]:
    """A host's results of peer_responder and peer_check; a failed module is that host's error."""
    if not answering or answering.get("skipped"):
        return {}
    entry = {name: answering.get(name) for name in ("responder", "holders", "error")}
    if answering.get("failed") or links.get("failed"):
        entry["error"] = str(answering.get("msg") or links.get("msg"))
    try:
        entry["links"] = decode(list[LinkTry], links.get("links") or [])
    except InvalidHostData as why:
        entry.update(links=[], error=f"sent an invalid answer: {why}")
    return entry


def program_answer(result: Mapping[str, Any]) -> dict[str, object]:
    """The JSON object printed by a trainer program, or its last output if there is none."""
    if not result or result.get("skipped"):
        return {}
    words = str(result.get("stderr") or result.get("msg") or "no output").strip().splitlines()
    return last_object(result) or {"ok": False, "phase": "start", "error": words[-1] if words else "no output"}


def manifest_digest(result: Mapping[str, Any]) -> str:
    """Digest of a host's manifest; equal data have equal manifests."""
    content = str(result.get("content") or "")
    return hashlib.sha256(content.encode()).hexdigest()[:12] if content else ""


def wrong_files(result: Mapping[str, Any]) -> dict[str, str]:
    """Data files that need fetching or repair, with the problem of each."""
    repaired = result.get("repaired") or {}
    return {path: repaired.get(path, "missing") for path in result.get("moved") or []}


def predicted_by(evidence: PreflightEvidence, seen: Mapping[str, Any]) -> Outlook | None:
    """The prediction, if every host's step and some link were measured."""
    hosts, matmul = [node["host"] for node in evidence.plan["nodes"]], evidence.plan["training"]["matmul"]
    measured = {host: piece(seen, host, "measured") for host in hosts}
    speeds = speeds_of(hosts, {host: with_precision(found, matmul) for host, found in measured.items()})

    def link_of(team: Sequence[str]) -> Link | None:
        within = [link for host, link in evidence.links() if host in team and link["host"] in team]
        return slowest_link(within, evidence.gloo.values())

    if not speeds or (link_of(hosts) is None and len(hosts) > 1):
        return None
    began = any(evidence.fact(host, "run", "sync") for host in hosts)
    busy = [one["host"] for host in evidence.probes for one in load(evidence, host)]
    return outlook(evidence.plan, speeds, link_of, speeds_together(list(measured.values())), began, busy)


def unmeasured(plan: Plan, seen: Mapping[str, Any]) -> list[Finding]:
    """Hosts on which measuring a step failed."""
    results = {node["host"]: piece(seen, node["host"], "step") for node in plan["nodes"]}
    failed = {host: program_answer(result) for host, result in results.items() if result.get("rc")}
    return [
        finding(
            "evidence-missing",
            host,
            f"a training step could not be measured: {told['error']}",
            severity=INFO,
            remedy="Without it the speed cannot be predicted; training itself may still work.",
        )
        for host, told in failed.items()
        if "error" in told
    ]


def unbuilt(evidence: PreflightEvidence, seen: Mapping[str, Any]) -> list[Finding]:
    """Hosts where the C kernels could not be built; those without a compiler are in the plan's findings."""
    found = []
    for node in evidence.plan["nodes"]:
        host, kernels = node["host"], node["flags"].get("kernels")
        why = piece(seen, host, "measured").get("no_kernels_because")
        can = kernels == "zig" or (kernels == "auto" and evidence.fact(host, "cpu", "compiler") is not False)
        if why and can:
            found.append(finding("no-compiler", host, f"the C kernels could not be built: {why}"))
    return found


def links_of(evidence: PreflightEvidence) -> list[dict[str, object]]:
    """Every measured direction, for programs."""
    keys = ("nic", "latency_ms", "bandwidth_mbit", "duplex_mbit", "mtu")
    return [
        {"host": host, "peer": link["host"], **{key: link.get(key) for key in keys}} for host, link in evidence.links()
    ]
