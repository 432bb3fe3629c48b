# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges all preflight results, once, on the controller; the reasoning is in module_utils/_preflight/judge.py."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.utils.display import Display

from ...module_utils._contract.findings import Finding, finding
from ...module_utils._contract.findings_table import ERROR, INFO
from ...module_utils._contract.plan import Plan
from ...module_utils._contract.probe import Measured
from ...module_utils._kit.printable import printable
from ...module_utils._kit.words import DASH, plural, table
from ...module_utils._plan.step_model import Link, speeds_of, speeds_together, with_precision
from ...module_utils._preflight.judge import Firewall, HostTries, PreflightEvidence, in_order, judge, load, ways_to
from ...module_utils._preflight.peer_check import closed_ports
from ...module_utils._preflight.predict import Outlook, advice, outlook, prediction_text, program_answer, slowest_link
from .._agent.carrier import Call
from .._configuration import display_is_ours
from .._display.texts import finding_text
from .kept import keep

display = Display()


# The results of the tasks on each host, by the names under which they are registered.
PIECES = {
    "answering": "__preflight_answering",
    "links": "ddp_links",
    "gloo": "__preflight_gloo",
    "step": "__preflight_step",
}
# Registered only for hosts that a peer could not reach.
FIREWALL = "__network_firewall"
Seen = Mapping[str, Mapping[str, Mapping[str, Any]]]  # host -> piece -> result


def judge_links(call: Call, plan: Plan, rates: bool) -> dict[str, object]:
    """Whether all connections are open; whether these are measured, too; and the ways to each host."""
    seen = seen_on_hosts(call, plan)
    evidence = gather(call, plan, seen, {})
    is_open = not any(closed_ports(link) for dummy, link in evidence.links())
    # What was to be opened is open.
    opened: dict[str, Firewall] = {host: {**found, "commands": []} for host, found in evidence.firewalls.items()}
    ways = {host: ways_to(evidence._replace(firewalls=opened), host) for host in seen}
    return {"open": is_open, "measured": is_open and rates, "ways": ways}


def judge_preflight(
    call: Call, plan: Plan, show: str = "text", file: str | None = None, **circumstances: Any
) -> dict[str, object]:
    """Findings, prediction and links; fails if the run must not start. circumstances: further fields of PreflightEvidence."""
    seen = seen_on_hosts(call, plan)
    evidence = gather(call, plan, seen, circumstances)
    found = [*judge(evidence), *missing(seen), *unmeasured(seen), *unbuilt(evidence, seen)]
    predicted = predicted_by(evidence, seen)
    if predicted:
        found += advice(evidence.plan, predicted)
    findings = in_order(found)
    keys = ("nic", "latency_ms", "bandwidth_mbit")
    links = [
        {"host": host, "peer": one["host"], **{key: one.get(key) for key in keys}} for host, one in evidence.links()
    ]
    document = {"run": evidence.plan["run"], "findings": findings, "prediction": predicted, "links": links}
    print_results(show, evidence, document)
    # Stored for comparison with the actual run.
    keep(file, document, "The findings", check=call.check)
    stopping = [one for one in findings if one["severity"] == ERROR]
    if not stopping:
        return {**document, "failed": False}
    listed = ", ".join(dict.fromkeys(f"{one['code']} ({one['host']})" for one in stopping))
    why = f"Preflight found {plural(len(stopping), 'error')}, so nothing was started: {listed}."
    return {**document, "failed": True, "msg": why}


def seen_on_hosts(call: Call, plan: Plan) -> dict[str, dict[str, Mapping[str, object]]]:
    """The results of the plan's hosts, in the order of their ranks. A task that a host was not asked for counts as tried."""
    found = {}
    for node in plan["nodes"]:
        known = call.variables["hostvars"][node["host"]]
        found[node["host"]] = {piece: known[name] for piece, name in PIECES.items() if known.get(name) is not None}
    return found


def print_results(how: str, evidence: PreflightEvidence, document: Mapping[str, Any]) -> None:
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
            # Two columns shorter than 80, since the display indents them.
            lines = prediction_text(evidence.plan, document["prediction"]).splitlines()
            parts += ["\n".join(part for line in lines for part in textwrap.wrap(line, 78, subsequent_indent="    "))]
        text = "\n\n".join(part for part in parts if part)
        if text:
            display.display(printable(text) + "\n")


def gather(call: Call, plan: Plan, seen: Seen, circumstances: Mapping[str, Any]) -> PreflightEvidence:
    """The evidence of every host, as input of the judgement."""
    hostvars = call.variables["hostvars"]
    firewalls = {host: hostvars[host].get(FIREWALL) or Firewall() for host in seen}
    gloo = {host: pieces["gloo"] for host, pieces in seen.items() if is_done(pieces.get("gloo"))}
    return PreflightEvidence(
        plan=plan,
        probes={host: hostvars[host].get("ddp_probe") or {} for host in seen},
        tries={
            host: host_tries(pieces["answering"], pieces.get("links") or {})
            for host, pieces in seen.items()
            if is_done(pieces.get("answering"))
        },
        firewalls={host: firewall for host, firewall in firewalls.items() if "commands" in firewall},
        gloo={host: program_answer(result) for host, result in gloo.items()},
        **circumstances,
    )


def is_done(result: Mapping[str, object] | None) -> bool:
    """Whether there is a result of a task that was not skipped."""
    return bool(result) and not (result or {}).get("skipped")


def missing(seen: Seen) -> list[Finding]:
    """Findings about evidence that some hosts have and others lack: a missing check is not a passed check."""
    tried_anywhere = {name for pieces in seen.values() for name in pieces}
    found = []
    for host, pieces in seen.items():
        if lacking := sorted(tried_anywhere - set(pieces)):
            text = f"{host} returned nothing about: {', '.join(lacking)}"
            found.append(finding("evidence-missing", host, text))
    return found


def host_tries(answering: Mapping[str, object], links: Mapping[str, Any]) -> HostTries:
    """A host's results of start_responder and peer_check; what has none is that host's error."""
    failed = [
        str(one["msg"]) for key, one in (("responder", answering), ("links", links)) if "msg" in one and key not in one
    ]
    return {"links": links.get("links") or [], "error": next(iter(failed), "")}


def measured_on(seen: Seen) -> dict[str, Measured]:
    """Each host's measurements of its step; empty if there are none."""
    return {host: pieces.get("step", {}).get("measured") or {} for host, pieces in seen.items()}


def predicted_by(evidence: PreflightEvidence, seen: Seen) -> Outlook | None:
    """The prediction, if every host's step and some link were measured."""
    hosts, matmul = list(seen), evidence.plan["training"]["matmul"]
    measured = measured_on(seen)
    speeds = speeds_of(hosts, {host: with_precision(found, matmul) for host, found in measured.items()})

    def link_of(team: Sequence[str]) -> Link | None:
        within = [link for host, link in evidence.links() if host in team and link["host"] in team]
        return slowest_link(within, evidence.gloo.values())

    if not speeds or (link_of(hosts) is None and len(hosts) > 1):
        return None
    busy = [one["host"] for host in evidence.probes for one in load(evidence, host)]
    return outlook(evidence.plan, speeds, link_of, speeds_together(list(measured.values())), busy)


def unmeasured(seen: Seen) -> list[Finding]:
    """Hosts on which measuring a step failed."""
    steps = {host: pieces["step"] for host, pieces in seen.items() if is_done(pieces.get("step"))}
    return [
        finding(
            "evidence-missing",
            host,
            f"a training step could not be measured: {step.get('error') or step.get('msg')}",
            severity=INFO,
            remedy="Without it the speed cannot be predicted; training itself may still work.",
        )
        for host, step in steps.items()
        if step.get("error") or "measured" not in step
    ]


def unbuilt(evidence: PreflightEvidence, seen: Seen) -> list[Finding]:
    """Hosts where the C kernels could not be built; those without a compiler are in the plan's findings."""
    found = []
    for host, measured in measured_on(seen).items():
        kernels, why = evidence.node(host)["flags"].get("kernels"), measured.get("no_kernels_because")
        can = kernels == "zig" or (kernels == "auto" and evidence.fact(host, "cpu", "compiler") is not False)
        if why and can:
            found.append(finding("no-compiler", host, f"the C kernels could not be built: {why}"))
    return found


def links_text(evidence: PreflightEvidence) -> str:
    """One line per direction between two hosts."""
    rows = [
        [
            f"{host} -> {link['host']}",
            link["nic"] or DASH,
            number(link["latency_ms"], "ms", 2),
            number(link["bandwidth_mbit"], "Mbit/s", 0),
        ]
        for host, link in evidence.links()
    ]
    return "\n".join(table(["link", "nic", "round trip", "rate"], rows)) if rows else ""


def number(value: float | None, unit: str, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f} {unit}"
