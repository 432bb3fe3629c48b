# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as text: in brief on a screen of 80 by 24 for two hosts, or whole, with the details."""

from __future__ import annotations

import shlex
import textwrap
from typing import Iterator, Optional

from .._contract import politeness
from .._contract.command_line import torchrun_argv
from .._contract.plan import Plan
from .._contract.versions import VENV_BYTES
from .._kit.words import bytes_text, columns, named, plural
from . import stages
from .data_set import times_read

COLUMNS, BY_HAND_COLUMNS = 78, 74
# A text read as many times is learnt by heart.
BY_HEART = 20


def human(number: float) -> str:
    """12_345_678 as 12.3M."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            scaled = number / (1e3 if letter == "k" else limit)
            return f"{scaled:.1f}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
    return f"{number:g}"


def render(plan: Plan, text_bytes: Optional[int] = None, whole: bool = True) -> str:
    """The plan as text; text_bytes: the size of the text to train on."""
    model, data, paths = plan["model"], plan["data"], ", ".join(plan["data"]["paths"])
    origin = {
        "text": f"{'the English' if data.get('prose') else 'text'} in {paths or '(not known yet)'} on {data['host']}",
        "url": data["url"],
        "host": f"shards in {paths} on {data['host']}",
        "controller": f"shards in {paths} on the controller",
    }[data["source"]]
    sections = {
        "model": [f"depth {model['depth']}, width {model['n_embd']}, {human(model['parameters']['total'])} parameters"],
        "stage": [stages.in_words(plan["stage"])] if "stage" in plan else [],
        "training": [*training_lines(plan, text_bytes), *absence_lines(plan)],
        "data": [f"{data['id']}: {data['shards']} shards from {origin}"],
        "details": list(details(plan)) if whole else [],
    }
    lines = [f"Run {plan['run']} on {plural(len(plan['nodes']), 'host')} (plan {plan['digest']})"]
    for name, own in sections.items():
        lines += labelled(name, own, whole)
    head = ("rank", "host", "address", "nic", "python", "threads", "rows", "memory")
    nodes = [
        (
            node["rank"], node["host"], node["address"] or "-", node["nic"] or "-", node["python_version"] or "-", node["threads"],
            node["rows"], "~" + bytes_text(node["memory_bytes"]),
        )
        for node in plan["nodes"]
    ]  # fmt: skip
    lines += ["", *columns([head, *nodes]), "", *labelled("changes", list(changes(plan)), whole)]
    return "\n".join(lines if whole else [*lines, "The whole plan: ansible-playbook nanochat.ddp.plan -i INVENTORY"])


def labelled(label: str, lines: list[str], whole: bool) -> list[str]:
    """A section with its label; the brief plan is wrapped for a screen."""
    if not whole:
        lines = [part for line in lines for part in textwrap.wrap(line, COLUMNS - 10, break_long_words=False)]
    return [f"{'' if at else label:10}{line}" for at, line in enumerate(lines)]


def training_lines(plan: Plan, text_bytes: Optional[int]) -> Iterator[str]:
    """The steps, how often they read the text, and how the ranks stay one model."""
    training, often, times = plan["training"], between_saves(plan), times_read(plan, text_bytes)
    timed = training.get("timed")
    about = "" if timed is None else f"{'until' if ':' in timed else 'for'} {timed}, about "
    steps, tokens = training["iterations"], human(training["tokens"])
    yield f"{about}{steps} steps of {training['total_batch']} tokens = {tokens} tokens"
    if times is not None:
        read = f"{times:.2g}" if times < 10 else human(round(times))
        heart = ": it will learn it by heart" if times >= BY_HEART else ""
        whose = "the" if plan["data"].get("prose") else "your"
        yield f"{plural(steps, 'step')} read {whose} text about {read} times{heart}"
    is_open = training["asked"]["sync"] == "auto"
    saves = f"every {often}" if often else "at the end"
    yield f"sync {training['sync']}{' (auto)' if is_open else ''}, head {training['head']}, saves {saves}"


def between_saves(plan: Plan) -> str:
    """The steps and minutes between two saves; empty if there is only the last one."""
    steps, minutes = plan["training"]["save_every"], plan["training"]["save_minutes"]
    return " or ".join([plural(steps, "step")] * (steps > 0) + [plural(minutes, "minute")] * (minutes > 0))


def absence_lines(plan: Plan) -> Iterator[str]:
    """Who may be away, with the steps repeated when a host is lost, and where training yields to other programs or leaves."""
    count, keeper, training, often = len(plan["nodes"]), plan.get("keeper"), plan["training"], between_saves(plan)
    since_save = f"up to {often}" if often and training["resume"] else "all steps"
    if keeper and count > 1:
        spare = count - keeper["min_hosts"]
        who = f"any {spare} of {count} hosts may be away" if spare else "no host may be away: the others wait"
        shared = f"{since_save} (with ddp_head whole: a step or two)"
        yield f"{who}; losing one repeats {'a step or two' if training['head'] == 'whole' else shared}"
    elif count > 1:
        yield f"no host may be away: the run ends; a restart repeats {since_save}"
    low = [node["host"] for node in plan["nodes"] if node["env"][politeness.VARIABLE] != politeness.OFF]
    guests = [
        node["host"] + (f" ({node['guest']['hours']})" if node["guest"]["hours"] else "")
        for node in plan["nodes"]
        if "guest" in node
    ]
    hosts = {"yields to other programs on": low, "leaves while the machine is needed:": guests}
    yield from (f"{what} {named(names)}" for what, names in hosts.items() if names)


def details(plan: Plan) -> Iterator[str]:
    """The lines that only the whole plan has."""
    model, training, ports, master = plan["model"], plan["training"], plan["data_ports"], plan["master"]
    counts = {name: human(count) for name, count in model["parameters"].items() if name != "total"}
    parts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
    yield (
        f"{plural(model['n_head'], 'head')} of {model['head_dim']}, rows of {model['sequence']} tokens, "
        f"windows {model['window_pattern']}, vocabulary {model['vocab_size']}"
    )
    yield f"{model['parameters']['total']:,} parameters: {parts}"
    yield f"{training['tokens_per_parameter']:g} tokens per parameter, {training['flops']:.2g} FLOPs, products {training['matmul']}"
    has_data = "conversations" not in plan.get("stage", {}) or "held_out" in plan["stage"]
    every = {"evaluation": training["eval_every"] if has_data else -1, "samples": training["sample_every"]}
    often = ", ".join(f"{what} every {steps}" if steps > 0 else f"no {what}" for what, steps in every.items())
    resumes = "resumes" if training["resume"] else "does not resume"
    yield f"{often}; {resumes}, times out after {plan['timeout_seconds']} s if a rank is missing"
    yield f"meets at {master['address']} port {master['port']}; data on ports {ports['low']}-{ports['high']}"
    for node in plan["nodes"]:
        own = node["venv_dir"].startswith(node["base_dir"] + "/")
        user = f" as {node['user']}" if node["user"] else ""
        yield f"{node['host']}: tmux session {node['session']}{user}{'' if own else ', Python in ' + node['venv_dir']}"


def changes(plan: Plan) -> Iterator[str]:
    """Changes that later steps may make on the hosts, where they are not in place."""
    nodes, ports, master = plan["nodes"], plan["data_ports"], plan["master"]
    yield "; ".join(f"{node['host']}: {node['base_dir']} (about {bytes_text(node['disk_bytes'])})" for node in nodes)
    roots = [node["host"] for node in nodes if node["user"] == "root"]
    if roots:
        yield f"{named(roots)}: training runs as root, the user of the inventory; ansible_user names another"
    yield f"PyTorch on each machine that lacks it: about {bytes_text(VENV_BYTES)} of disk more"
    keeper = plan.get("keeper")
    if plan["manage_firewall"] and any(node["peers"] for node in nodes):
        meets = f"port {master['port']} of {master['host']}"
        if keeper:
            keepers = ", ".join(map(str, sorted({node["keeper_port"] for node in nodes})))
            meets = f"port {master['port']}, the keepers' port {keepers}"
        opened = f"{meets} and ports {ports['low']}-{ports['high']} of every host"
        yield f"active firewalls: {opened}, open to the peers only"
    if keeper and keeper["survive_reboot"]:
        yield "start after a reboot: a user unit of systemd, with lingering; reset removes it"


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
