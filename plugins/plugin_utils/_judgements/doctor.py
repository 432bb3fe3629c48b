# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The doctor: which plan a run was started with, the evidence of each host, and the verdict, whose reasoning is in _doctor/judge.py."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...module_utils._contract.decode import believed_plans
from ...module_utils._contract.plan import Plan
from ...module_utils._doctor.evidence import Case, RankEvidence, bundle
from ...module_utils._doctor.judge import diagnose
from ...module_utils._kit.printable import printable
from .._agent.carrier import Call, decoded
from .._runs import Answers, age
from .kept import keep


def deployed_plan(call: Call, found: Answers) -> dict[str, object]:
    """The plan that most hosts sent with a run, of those the one of the newest training; found: what run_info returned by host."""
    answers = [one for one in found.values() if one and one.get("plan") is not None]
    having = [(age(run), one["plan"]) for one in answers if (run := one.get("run"))]
    newest = sorted(having, key=lambda one: one[0], reverse=True)
    plans = believed_plans([plan for dummy, plan in newest], call.variables["groups"]["all"])
    if plans:
        return {"plan": plans[0]}
    run = call.which_run()["run"]
    nobody = f"No host that answers has a run{f' {run}' if run else ''} with its plan (plan.json, undamaged) below its base folder"
    return {"failed": True, "msg": f"{nobody}, so there is nothing to examine."}


def doctor_info(call: Call, plan: Plan) -> dict[str, object]:
    """The evidence about the host's rank of a plan, which another host may have sent; see the verb on the host."""
    nodes = {node["host"]: node for node in plan["nodes"] if node["host"] in call.variables["groups"]["all"]}
    if call.host not in nodes:
        return {}
    told = call.ask(
        "doctor_info",
        # A plan of one host lacks the folders of the others.
        run_dir=f"{call.which_run()['base_dir']}/runs/{plan['run']}",
        rank=nodes[call.host]["rank"],
        peers=[{"host": host, "address": node["address"]} for host, node in nodes.items() if host != call.host],
        # Any data port will do: firewalls are open there, so an unused port refuses at once, and only a blocked link stays silent.
        probe_port=plan["data_ports"]["high"],
    )
    return decoded(told, {"evidence": RankEvidence}, call.host)


def judge_verdict(
    call: Call, plan: Plan, evidence: Mapping[str, object], results_dir: str, as_json: bool = False
) -> dict[str, object]:
    """The doctor's single finding, as lines for people or JSON; evidence: what doctor_info returned by host, stored below results_dir."""
    hosts, known = [node["host"] for node in plan["nodes"]], call.variables["hostvars"]
    gone = {"unreachable": True, "msg": "it is not in this inventory"}
    there = [host for host in hosts if host in call.variables["groups"]["all"]]
    case = Case(plan, {host: evidence.get(host) if host in there else gone for host in hosts})
    told = diagnose(case)
    file = f"{results_dir}/{plan['run']}/doctor.json"
    secrets = [known[host].get("ddp_secret_env") or {} for host in there]
    whole = bundle(case, secrets, {"verdict": told["verdict"], "summary": told["evidence"]})
    keep(file, whole, "The evidence", 0o600)
    if as_json:
        return {**told, "lines": json.dumps(told, indent=4, sort_keys=True).splitlines()}
    verdict = told["verdict"]
    lines = [f"{verdict['code']}: {verdict['seen']}", f"  why: {verdict['why']}", f"  do:  {verdict['remedy']}"]
    lines += [f"  {line}" for line in (*told["evidence"], f"full evidence: {file}")]
    return {**told, "lines": printable("\n".join(lines)).splitlines()}
