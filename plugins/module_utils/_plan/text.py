# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as text: the model, the training, the hosts, the data, and the changes."""

from __future__ import annotations

import shlex
import textwrap
from typing import Any, Mapping, Optional, Sequence

from .._contract import politeness
from .._contract.command_line import torchrun_argv
from .._contract.plan import Plan
from .._contract.versions import VENV_BYTES
from .._kit.words import bytes_text, columns, named, plural
from . import stages
from .data_set import times_read

BY_HAND_COLUMNS = 74
# A text read as many times is learnt by heart.
BY_HEART = 20


def human(number: float) -> str:
    """12_345_678 as 12.3M."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            scaled = number / (1e3 if letter == "k" else limit)
            return f"{scaled:.1f}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
    return f"{number:g}"


def render(plan: Plan, text_bytes: Optional[int] = None) -> str:
    """The whole plan as text; text_bytes: the size of the text to train on."""
    lines = [f"Run {plan['run']} on {plural(len(plan['nodes']), 'host')} (plan {plan['digest']})", ""]
    rows = [
        ("model", model_lines(plan["model"])),
        ("stage", [stages.in_words(plan["stage"])] if "stage" in plan else []),
        ("training", training_lines(plan, text_bytes)),
        ("trainer", trainer_lines(plan)),
        ("data", [data_line(plan)]),
        ("network", [network_line(plan)]),
    ]
    lines += columns([("" if at else name, line) for name, own in rows for at, line in enumerate(own)], "")
    lines += ["", *node_table(plan), "", *changes(plan)]
    return "\n".join(lines)


def brief(plan: Plan, text_bytes: Optional[int] = None) -> str:
    """The main figures of a plan, on a screen of 80 by 24 for two hosts."""
    model, training, often = plan["model"], plan["training"], between_saves(plan["training"])
    rows = [
        ("model", [f"depth {model['depth']}, width {model['n_embd']}, {human(model['parameters']['total'])} parameters"]),
        ("stage", [stages.in_words(plan["stage"])] if "stage" in plan else []),
        ("training", [
            f"{about(training)}{training['iterations']} steps of {training['total_batch']} tokens = {human(training['tokens'])} tokens",
            *reading_lines(plan, text_bytes),
            f"sync {sync(training)}, head {training['head']}, saves {f'every {often}' if often else 'at the end'}",
            *absence_lines(plan),
            *polite_lines(plan),
        ]),
        ("trainer", trainer_lines(plan)),
        ("data", [data_line(plan, "")]),
    ]  # fmt: skip
    lines = [f"Run {plan['run']} on {plural(len(plan['nodes']), 'host')} (plan {plan['digest']})"]
    for name, own in rows:
        lines += wrapped("\n".join(own), name.ljust(10))
    lines += ["", *node_table(plan), ""]
    where = [f"{node['host']}: {node['base_dir']} (about {bytes_text(node['disk_bytes'])})" for node in plan["nodes"]]
    lines += wrapped("\n".join(["; ".join(where), *further_changes(plan)]), "changes   ")
    return "\n".join([*lines, "The whole plan: ansible-playbook nanochat.ddp.plan -i INVENTORY"])


def wrapped(text: str, label: str) -> list[str]:
    """Lines of at most 78 columns, the first after a label."""
    parts = [
        part for line in text.splitlines() for part in textwrap.wrap(line, 78 - len(label), break_long_words=False)
    ]
    return [f"{' ' * len(label) if at else label}{part}" for at, part in enumerate(parts)]


def between_saves(training: Mapping[str, Any]) -> str:
    """The steps and minutes between two saves; empty if there is only the last one."""
    steps, minutes = training["save_every"], training["save_minutes"]
    return " or ".join([plural(steps, "step")] * (steps > 0) + [plural(minutes, "minute")] * (minutes > 0))


def model_lines(model: Mapping[str, Any]) -> list[str]:
    parameters = model["parameters"]
    parts = [f"{name.replace('_', ' ')} {human(value)}" for name, value in parameters.items() if name != "total"]
    return [
        f"depth {model['depth']}, width {model['n_embd']}, {plural(model['n_head'], 'head')} of {model['head_dim']}, "
        f"rows of {model['sequence']} tokens, windows {model['window_pattern']}, vocabulary {model['vocab_size']}",
        f"{parameters['total']:,} parameters: {', '.join(parts)}",
    ]


def training_lines(plan: Plan, text_bytes: Optional[int]) -> list[str]:
    training: dict[str, Any] = {**plan["training"]}
    if not stages.evaluates(plan):
        training["eval_every"] = -1
    resumes = "resumes" if training["resume"] else "does not resume"
    return [
        f"{about(training)}{training['iterations']} steps of {training['total_batch']} tokens = {human(training['tokens'])} tokens, "
        f"{training['tokens_per_parameter']:g} per parameter, {training['flops']:.2g} FLOPs",
        f"sync {sync(training)}, head {training['head']}, products {training['matmul']}, {schedule(training)}",
        *reading_lines(plan, text_bytes),
        f"{resumes}, times out after {plan['timeout_seconds']} s if a rank is missing",
        *absence_lines(plan),
        *polite_lines(plan),
    ]


def reading_lines(plan: Plan, text_bytes: Optional[int]) -> list[str]:
    """How often the text is read."""
    times = times_read(plan, text_bytes)
    if times is None:
        return []
    often = f"{times:.2g}" if times < 10 else human(round(times))
    heart = ": it will learn it by heart" if times >= BY_HEART else ""
    whose = "the" if plan["data"].get("prose") else "your"
    return [f"{plural(plan['training']['iterations'], 'step')} read {whose} text about {often} times{heart}"]


def about(training: Mapping[str, Any]) -> str:
    """A run's end time, instead of a number of steps."""
    timed = training.get("timed")
    return "" if timed is None else f"{'until' if ':' in timed else 'for'} {timed}, about "


def absence_lines(plan: Plan) -> list[str]:
    """Who may be away, and the steps repeated when a host is lost."""
    names, keeper, training = [node["host"] for node in plan["nodes"]], plan.get("keeper"), plan["training"]
    if len(names) < 2:
        return []
    spare = len(names) - keeper["min_hosts"] if keeper else 0
    often = between_saves(training)
    since_save = f"up to {often}" if often and training["resume"] else "all steps"
    if not keeper:
        return [f"no host may be away: the run ends; a restart repeats {since_save}"]
    if not spare:
        who = "no host may be away: the others wait"
    else:
        who = f"{' or '.join(names) if len(names) == 2 else f'any {spare} of {len(names)} hosts'} may be away"
    rescued = training["head"] == "whole"
    repeats = "a step or two" if rescued else f"{since_save} (with ddp_head whole: a step or two)"
    return [f"{who}; losing one repeats {repeats}"]


def polite_lines(plan: Plan) -> list[str]:
    """Hosts on which training yields to other programs, and guests."""
    low = [node["host"] for node in plan["nodes"] if node["env"][politeness.VARIABLE] != politeness.OFF]
    guests = [
        node["host"] + (f" ({node['guest']['hours']})" if node["guest"]["hours"] else "")
        for node in plan["nodes"]
        if "guest" in node
    ]
    hosts = {"yields to other programs on": low, "leaves while the machine is needed:": guests}
    return [f"{what} {named(names)}" for what, names in hosts.items() if names]


def sync(training: Mapping[str, Any]) -> str:
    """The sync method, with a mark if the settings left it open."""
    way = str(training["sync"])
    return f"{way} (auto)" if training["asked"]["sync"] == "auto" and way != "upstream" else way


def trainer_lines(plan: Plan) -> list[str]:
    """Empty for this collection's own trainer."""
    trainer = plan["trainer"]
    if trainer["source"] == "ours":
        return []
    joined = ", unchanged; join.py makes its ranks train one model" if trainer.get("joined") else ""
    return [f"nanochat of {trainer['url']}{joined}"]


def schedule(training: Mapping[str, Any]) -> str:
    often = training["save_minutes"]
    minutes = f" and every {plural(often, 'minute') if often > 1 else 'minute'}" if often else ""
    steps = ", ".join(
        f"{what} every {training[name]}" if training[name] > 0 else without
        for what, name, without in (
            ("evaluates", "eval_every", "no evaluation"),
            ("samples", "sample_every", "no samples"),
            ("saves", "save_every", "saves at the end"),
        )
    )
    return steps + minutes


def data_line(plan: Plan, last: str = ", the last for validation,") -> str:
    data = plan["data"]
    shards = f"shards in {', '.join(data['paths'])}"
    origin = {
        "text": f"{'the English' if data.get('prose') else 'text'} in {', '.join(data['paths']) or '(not known yet)'} on {data['host']}",
        "url": f"{data['url']}",
        "host": f"{shards} on {data['host']}",
        "controller": f"{shards} on the controller",
    }[data["source"]]
    return f"{data['id']}: {data['shards']} shards{last} from {origin}"


def network_line(plan: Plan) -> str:
    master, ports = plan["master"], plan["data_ports"]
    return f"meets at {master['address']} port {master['port']}; data on ports {ports['low']}-{ports['high']}"


def node_table(plan: Plan) -> list[str]:
    """A table of the hosts that fits 80 columns."""
    head = ("rank", "host", "address", "nic", "python", "threads", "rows", "memory")
    rows = [
        (
            node["rank"], node["host"], node["address"] or "-", node["nic"] or "-", node["python_version"] or "-", node["threads"],
            node["rows"], "~" + bytes_text(node["memory_bytes"]),
        )
        for node in plan["nodes"]
    ]  # fmt: skip
    return columns([head, *rows])


def changes(plan: Plan) -> list[str]:
    """Changes that later steps may make on the hosts."""
    lines = []
    for node in plan["nodes"]:
        own = node["venv_dir"].startswith(node["base_dir"] + "/")
        venv = "" if own else f", {node['venv_dir']}"
        user = f" as {node['user']}" if node["user"] else ""
        disk = f" (about {bytes_text(node['disk_bytes'])})"
        lines.append(
            f"{node['host']}: files below {node['base_dir']}{disk}{venv}; tmux session {node['session']}{user}"
        )
    return [
        "Changes on the hosts (skipped where already in place):",
        *(f"  {line}" for line in [*lines, *further_changes(plan)]),
    ]


def further_changes(plan: Plan) -> list[str]:
    """Changes besides the run's own files and sessions."""
    nodes, ports = plan["nodes"], plan["data_ports"]
    lines = []
    roots = [node["host"] for node in nodes if node["user"] == "root"]
    if roots:
        lines.append(f"{named(roots)}: training runs as root, the user of the inventory; ansible_user names another")
    lines.append(f"PyTorch, once on each machine: about {bytes_text(VENV_BYTES)} of disk more")
    if plan["manage_firewall"] and any(node["peers"] for node in nodes):
        meets = f"port {plan['master']['port']} of {plan['master']['host']}"
        if plan.get("keeper"):
            keepers = sorted({node["keeper_port"] for node in nodes})
            meets = f"port {plan['master']['port']}, the keepers' port {', '.join(map(str, keepers))}"
        opened = f"{meets} and ports {ports['low']}-{ports['high']} of every host"
        lines.append(f"active firewalls: {opened}, open to the peers only")
    if plan.get("keeper", {}).get("survive_reboot"):
        lines.append(
            "start after a reboot: a user unit of systemd, with lingering, else a line of the crontab; reset removes it"
        )
    return lines


def by_hand(plan: Plan) -> str:
    """How to start the first host's rank without Ansible, wrapped for a terminal of 80 columns."""
    node = plan["nodes"][0]
    lines = [f"cd {shlex.quote(node['trainer_dir'])}", f"set -a; . {shlex.quote(node['run_dir'] + '/env')}", ""]
    for word in map(shlex.quote, torchrun_argv(plan, node)):
        if len(lines[-1]) + 1 + len(word) > BY_HAND_COLUMNS and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    others = ["The other hosts have their own --node-rank and paths."] if len(plan["nodes"]) > 1 else []
    return "\n".join([f"By hand, without Ansible, on {node['host']}:", *(f"  {line}" for line in lines), *others])


def render_findings(findings: Sequence[Mapping[str, Any]]) -> str:
    """The findings of the plan, each with its remedy."""
    lines = []
    for found in findings:
        where = f" {found['host']}" if found["host"] else ""
        lines += [f"{found['severity'].upper()} {found['code']}{where}: {found['seen']}.", f"    {found['remedy']}"]
    return "\n".join(lines)
