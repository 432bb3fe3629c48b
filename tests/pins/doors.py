# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The only file of the pins that knows how the product is called: through its playbooks, roles, actions, modules and scripts.

Each door takes cases as data and returns for each what a user meets: facts (values that a program would compare) apart from
sentences (what a person reads). When the inside of the product changes, this file may change and the data must not.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from ansible.plugins.action import ActionBase
from ansible_collections.nanochat.ddp.plugins.action.agent import ActionModule
from ansible_collections.nanochat.ddp.tests.pins.run_folders import RunFolders

Case = Mapping[str, Any]
Cases = Mapping[str, Case]

PINS = Path(__file__).resolve().parent
ROOT = PINS.parents[1]
GIVEN = PINS / "data" / "given"
COLLECTIONS = ROOT / ".ansible" / "collections"
TOOLS = Path(sys.executable).parent
# Each waits for its hosts most of the time.
AT_ONCE = 4


def given(name: str) -> Any:
    """An input of the pins."""
    return json.loads((GIVEN / f"{name}.json").read_text(encoding="utf-8"))


def changed(document: Any, changes: Case) -> Any:
    """A copy with other values at some places, such as `nics.0.speed_mbit`."""
    found = copy.deepcopy(document)
    for place, value in changes.items():
        *way, last = [int(key) if key.isdigit() else key for key in place.split(".")]
        inner = found
        for key in way:
            inner = inner[key] if isinstance(inner, list) else inner.setdefault(key, {})
        inner[last] = copy.deepcopy(value)
    return found


def merged(document: Case, more: Case) -> dict[str, Any]:
    """Both documents in one; where both have a value, that of the second."""
    both = {
        key: merged(document[key], value)
        for key, value in more.items()
        if isinstance(value, dict) and isinstance(document.get(key), dict)
    }
    return {**document, **more, **both}


def differing(first: Case, other: Case) -> dict[str, Any]:
    """What the other has in another way than the first; null is what it lacks."""
    return {key: other.get(key) for key in {**first, **other} if first.get(key) != other.get(key)}


# What differs from one replay to the next, or from machine to machine, and what stands for it.
_VARYING = (
    (re.compile(re.escape(str(ROOT))), "CHECKOUT"),
    (re.compile(r"\b\d\d:\d\d(:\d\d)?\b"), "HH:MM"),
    (re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?=HH:MM)"), ""),
    (re.compile(r"\(plan [0-9a-f]{16}\)"), "(plan DIGEST)"),
    (re.compile(r"\b\d+ (h|min|s)( \d+ (min|s))? (ago|left)\b"), r"TIME \4"),
    (re.compile(r"\bfor (\d+ h )?(\d+ min )?\d+(\.\d)? s\b"), "for TIME"),
    (re.compile(r"(?m)\b(\d+ h )?\d+ (min \d+ s|min|s)$"), "TIME"),
    (re.compile(r"\bprocess \d+"), "process PID"),
    (re.compile(r"kill -CONT \d+"), "kill -CONT PID"),
    (re.compile(r"load [\d.]+ on \d+ cores, [\d.]+ \w+ free memory"), "LOAD"),
    (re.compile(r"state [DRS], \d+ % of a core, [\d.]+ \wB"), "state S, USE"),
    (re.compile(r"state T, \d+ % of a core, [\d.]+ \wB"), "state T, USE"),
)


def steady(text: str, *more: tuple[str, str]) -> str:
    """A sentence as every replay gives it."""
    for found, stands in more:
        text = text.replace(found, stands)
    for pattern, stands in _VARYING:
        text = pattern.sub(stands, text)
    return text


def steadied(document: Any, *more: tuple[str, str]) -> Any:
    """The same of all texts in a document."""
    if isinstance(document, dict):
        return {key: steadied(value, *more) for key, value in document.items()}
    if isinstance(document, list):
        return [steadied(one, *more) for one in document]
    return steady(document, *more) if isinstance(document, str) else document


def figure(value: Any) -> Any:
    """Four digits of a number are enough to notice a change, and the same on every machine."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


# -- the action that judges -----------------------------------------------------------------------------------------------


def judge(verb: str, variables: Case | None = None, **options: Any) -> dict[str, Any]:
    """A judgement of the action nanochat.ddp.agent, in this process."""
    task = SimpleNamespace(args={"verb": verb, **options}, check_mode=False)
    with mock.patch.object(ActionBase, "run", lambda self, tmp=None, task_vars=None: {}):
        return dict(ActionModule(task, None, None, None, None, None).run(task_vars=variables or {}))


def machines(inventory: Case) -> dict[str, dict[str, Any]]:
    """The variables of each host of an inventory, with its probe as a fact."""
    known = {}
    for name, host in inventory["hosts"].items():
        probe = changed(given("machines")[host.get("machine", name)], host.get("change", {}))
        variables = {**inventory.get("settings", {}), **host.get("settings", {})}
        variables = json.loads(json.dumps(variables).replace("CHECKOUT/", f"{ROOT}/"))
        known[name] = {"ansible_host": name, **variables, **({} if host.get("off") else {"ddp_probe": probe})}
        if host.get("off"):
            known[name]["ddp_probe_error"] = host["off"]
    return known


def planned(inventory: Case, **options: Any) -> dict[str, Any]:
    """The plan of an inventory."""
    known = machines(inventory)
    return judge("make_plan", {"hostvars": known}, hosts=list(known), show="none", **options)


# -- plans ----------------------------------------------------------------------------------------------------------------

_NODE = (
    "rank address nic rows head_share accumulation threads cores python base_dir data_dir session keeper_port data_ports open_ports"
    " peers guest env env_secret"
)
_PLAN = "run world master data_ports manage_firewall timeout_seconds keeper stage"
_TRAINING = (
    "profile total_batch device_batch batch_split rows iterations tokens sync head timed matmul eval_every eval_tokens sample_every"
    " save_every save_minutes keep_checkpoints resume tracker"
)


def picked(document: Case, names: str) -> dict[str, Any]:
    """What it says of these, where it says anything."""
    return {name: figure(document[name]) for name in names.split() if document.get(name) not in (None, [], {})}


def findings_of(found: Iterable[Case]) -> dict[str, Any]:
    """Findings: their codes, and what they say."""
    facts = [" ".join([one["code"], one["severity"], one["host"] or "-", one["peer"] or ""]).strip() for one in found]
    said = [f"{one['code']}: {steady(one['seen'])} => {steady(one['remedy'])}" for one in found]
    return {"facts": facts, "sentences": said}


def node_of(node: Case, first: Case) -> dict[str, Any]:
    """A host's part; of the command and the environment of later ranks what differs from those of the first."""
    argv, others = (shlex.join(one["argv"]).replace(" --", "\n--").split("\n") for one in (node, first))
    env = node["env"]
    if node is not first:
        flags = {word.partition("=")[0] for word in argv}
        gone = [f"without {word}" for word in others[1:] if word.partition("=")[0] not in flags]
        argv = gone + [word for word in argv if word not in others]
        env = differing(first["env"], env)
    return {
        **picked(node, _NODE),
        "env": env,
        "argv": argv,
        "session": shlex.join(node.get("session_argv") or ["argv"]),
    }


def plan_of(inventory: Case) -> dict[str, Any]:
    """What a plan decides, or why there is none."""
    told = planned(inventory)
    if told.get("failed"):
        return {"refused": findings_of(told["problems"])}
    plan, found = told["plan"], findings_of(told["findings"])
    nodes = {node["host"]: node_of(node, plan["nodes"][0]) for node in plan["nodes"]}
    facts = {
        **picked(plan, _PLAN),
        "model": {
            **picked(plan["model"], "depth n_embd n_head sequence vocab_size"),
            **plan["model"]["parameters"],
        },
        "training": picked(plan["training"], _TRAINING),
        "data": picked(plan["data"], "source shards vocab_size id host paths url"),
        "trainer": picked(plan["trainer"], "script torch offline"),
        "nodes": nodes,
        "findings": found["facts"],
    }
    said = {"plan": told["text"].splitlines(), "findings": found["sentences"]}
    return {"facts": json.loads(json.dumps(facts).replace(str(ROOT), "CHECKOUT")), "sentences": steadied(said)}


def plans(cases: Cases) -> dict[str, Any]:
    """The plan of each inventory."""
    return {name: plan_of(inventory) for name, inventory in cases.items()}


def apart(was: Any, now: Any) -> Any:
    """Only what differs from another document; of lists of texts those that only one of the two has."""
    if isinstance(was, dict) and isinstance(now, dict):
        return {key: apart(was.get(key), now.get(key)) for key in differing(was, now)}
    if isinstance(was, list) and isinstance(now, list) and all(isinstance(one, str) for one in was + now):
        return [f"without {one}" for one in was if one not in now] + [one for one in now if one not in was]
    return now


def choices(cases: Cases) -> dict[str, Any]:
    """What plans decide in another way than those of the inventories that they are like, or why there is none; what they tell anew."""
    known, told = given("plans"), {}
    for name, case in cases.items():
        known[name] = merged(known[case["like"]], case["inventory"])
        like, plan = plan_of(known[case["like"]]), plan_of(known[name])
        if "refused" not in plan:
            new = {
                what: [one for one in lines if one not in like["sentences"][what]]
                for what, lines in plan["sentences"].items()
            }
            plan = {"facts": apart(like["facts"], plan["facts"]), "sentences": picked(new, "plan findings")}
        told[name] = picked(plan, "facts sentences refused")
    return told


# -- findings of preflight ------------------------------------------------------------------------------------------------


# The names under which the tasks of preflight register their results.
_REGISTERED = {
    "answering": "__preflight_answering", "links": "ddp_links", "firewall": "__network_firewall", "gloo": "__preflight_gloo",
    "step": "__preflight_step",
}  # fmt: skip


def evidence_of(case: Case) -> dict[str, Any]:
    """The results that the tasks of preflight would leave on each host, but for those with "no answer"."""
    seen = changed(given("evidence"), case.get("evidence", {}))
    for host, pieces in seen.items():
        seen[host] = pieces = {name: piece for name, piece in pieces.items() if piece != "no answer"}
        if "gloo" in pieces:
            pieces["gloo"] = {"stdout": json.dumps(pieces["gloo"]), "rc": 0}
    return dict(seen)


def findings(cases: Cases) -> dict[str, Any]:
    """What preflight finds, and the speed that it expects."""
    told = {}
    for name, case in cases.items():
        inventory = merged(given("plans")[case["like"]], case.get("inventory", {}))
        made = planned(inventory, tolerant=True)
        known = machines(inventory)
        for host, pieces in evidence_of(case).items():
            known[host].update({_REGISTERED[name]: piece for name, piece in pieces.items()})
        options = {"rehearsal": True, "show": "none", **case.get("options", {})}
        judged = judge(
            "judge_preflight", {"hostvars": known}, plan=made["plan"], plan_findings=made["findings"], **options
        )
        found = findings_of(judged["findings"])
        told[name] = {
            "facts": {
                "findings": found["facts"],
                "stops": judged["failed"],
                **(
                    {"prediction": {key: figure(value) for key, value in judged["prediction"].items()}}
                    if judged["prediction"]
                    else {}
                ),
            },
            "sentences": found["sentences"],
        }
    return told


# -- run folders ----------------------------------------------------------------------------------------------------------

_HOST = (
    "state shown rank world step done steps rows rows_before rows_changed loss first_loss val_bpb tokens_per_second_mean"
    " step_seconds wait_share memory_bytes bytes_sent identical digest saved training share end_reason end_cause end_blames"
    " error cause exit_code signal revived died_of phase membership problem"
)
_MEMBERSHIP = "state generation members why waits hears away repeated gave_way"
# In the plays below the hosts are folders of this machine, or at a port where nobody listens.
_VARIABLES = {
    "ansible_connection": "{{ 'ssh' if inventory_hostname in pin_off else 'local' }}",
    "ansible_python_interpreter": sys.executable, "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_timeout": 5,
    "ddp_base_dir": "{{ pin_root }}/{{ inventory_hostname }}", "ddp_results_dir": "{{ pin_root }}/results",
}  # fmt: skip
HOSTS = ("desktop", "laptop", "tower")
# The task of playbook status that prints; again for people, it prints what the whole playbook has found for programs.
STATUS = yaml.safe_load((ROOT / "playbooks" / "status.yml").read_text(encoding="utf-8"))[0]["tasks"]
PRINT = [task for task in STATUS if "ansible.builtin.debug" in task]


def played(folder: Path, plays: Iterable[Case], hosts: Iterable[str]) -> list[list[str]]:
    """What each play prints, text by text: what it says to people, and why it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inventory.json").write_text(
        json.dumps({"trainers": {"hosts": {host: {} for host in hosts}}}), encoding="utf-8"
    )
    (folder / "plays.json").write_text(json.dumps(list(plays)), encoding="utf-8")
    (folder / "ansible.cfg").write_text("[defaults]\n", encoding="utf-8")
    # What the kernel of this machine did to others is no part of a pin.
    (folder / "dmesg").write_text("#!/bin/sh\n", encoding="ascii")
    (folder / "dmesg").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_FORKS": "3", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", "PWD": str(folder),
    }  # fmt: skip
    argv = [str(TOOLS / "ansible-playbook"), "-i", "inventory.json", "plays.json"]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    begin = done.stdout.find("{\n")
    assert begin >= 0, done.stdout + done.stderr
    return [
        [text for task in play["tasks"] for text in said(task["hosts"])]
        for play in json.loads(done.stdout[begin:])["plays"]
    ]


def said(results: Mapping[str, Case]) -> list[str]:
    """What a task says: a text of several lines, or why it failed on a host."""
    texts = [
        "\n".join(one["msg"]) if isinstance(one.get("msg"), list) else str(one["msg"])
        for one in results.values()
        if one.get("msg")
    ]
    failed = any(one.get("failed") and not one.get("ignore_errors") for one in results.values())
    told = any(isinstance(one.get("msg"), list) for one in results.values())
    return list(dict.fromkeys(texts)) if told or failed else []


def looks(built: Any) -> list[dict[str, Any]]:
    """The plays that look at one run: its status for programs and for people, the doctor, and its closing screen if it is over."""
    hosts = ",".join(node["host"] for node in built.plan["nodes"])
    off = [node["host"] for node in built.plan["nodes"] if built.case["hosts"].get(node["host"], {}).get("off")]
    known = {**_VARIABLES, "target": hosts, "pin_root": str(built.root), "pin_off": off}
    controller = {"watch": True, "results_dir": f"{built.root}/results"}
    role = "ansible.builtin.import_role"
    doctor = [
        {
            role: {"name": "nanochat.ddp.doctor", "tasks_from": tasks},
            "vars": {"doctor_json": True},
        }
        for tasks in ("deployed", "main")
    ]
    watch = [{role: {"name": "nanochat.ddp.watch"}, "vars": {"watch_doctor": ""}}]
    told = {"ansible.builtin.debug": {"msg": ["{{ watch_judged.verdicts | to_json }}"]}, "run_once": True}
    play = {"hosts": hosts, "gather_facts": False, "vars": {**known, "ddp_controller": controller}}
    quiet = {"rescue": [{"ansible.builtin.meta": "clear_host_errors"}]}
    return [
        {"ansible.builtin.import_playbook": "nanochat.ddp.status", "vars": {**known, "ddp_json": True}},
        {**play, "tasks": PRINT},
        {**play, "tasks": [{"block": doctor, **quiet}]},
        *(
            [{**play, "vars": {**play["vars"], "ddp_plan": built.plan}, "tasks": [{"block": watch, **quiet}, told]}]
            if built.case.get("closing")
            else []
        ),
    ]


def host_of(found: Case, now: float) -> dict[str, Any]:
    """The state of a run on one host."""
    facts = picked(found, _HOST)
    if "membership" in facts:
        facts["membership"] = picked(facts["membership"], _MEMBERSHIP)
        facts["membership"]["away"] = [
            {**one, **{key: round(one[key] - now) for key in ("left", "back") if one[key]}}
            for one in facts["membership"].get("away", [])
        ]
        for one in facts["membership"].get("gave_way", []):
            one["time"] = round(one["time"] - now)
    if "training" in facts:
        facts["training"] = picked(facts["training"], "id number")
    return facts


def run_of(built: Any, texts: list[list[str]]) -> dict[str, Any]:
    """What the looks at a run say."""
    status, screen, doctor, *closing = texts
    found = json.loads(status[0])
    # Whether this machine is busy with something else is no part of the case.
    judged = json.loads(doctor[0].replace('"healthy-slow"', '"healthy"')) if doctor[0].startswith("{") else None
    verdict = judged and judged["verdict"]
    (first, one), *others = [(host, host_of(run, built.now)) for host, run in found["hosts"].items()]
    facts = {
        "status": {
            **picked(found, "run slowest"),
            first: one,
            **{host: differing(one, other) for host, other in others},
        },
        # Whether a healthy run is slow depends on the machine that plays this.
        "doctor": picked(
            {**verdict, **({"severity": "info"} if verdict["code"] == "healthy" else {})}, "code severity host peer"
        )
        if verdict
        else "no plan",
    }
    sentences = {"status": screen[0].splitlines(), "doctor": doctor}
    if verdict:
        sentences["doctor"] = [verdict["seen"], verdict["remedy"], *judged["evidence"]]
        if verdict["code"] == "healthy":
            sentences["doctor"] = [verdict["seen"].partition("(")[0]]
    if closing:
        table, *why, ended = closing[0]
        facts["closing"] = json.loads(ended)
        sentences["closing"] = [*table.splitlines(), *why]
    return steadied({"facts": facts, "sentences": sentences}, (str(built.root), "BASE"))


def runs(cases: Cases, folder: Path) -> dict[str, Any]:
    """Status, doctor and closing screen of each run folder."""
    plans_of, stack = given("run_plans"), contextlib.ExitStack()
    with stack, ThreadPoolExecutor(AT_ONCE) as pool:
        built = {}
        for number, (name, case) in enumerate(cases.items()):
            plan = changed(plans_of[case["plan"]], case.get("change", {}))
            built[name] = stack.enter_context(RunFolders(folder / f"case-{number}", plan, case))
        parts = [list(built)[part::AT_ONCE] for part in range(AT_ONCE)]

        def look(part: list[str]) -> dict[str, list[list[str]]]:
            plays = {name: looks(built[name]) for name in part}
            texts = iter(
                played(
                    folder / f"plays-{list(built).index(part[0])}",
                    [play for each in plays.values() for play in each],
                    HOSTS,
                )
            )
            return {name: [next(texts) for _play in each] for name, each in plays.items()}

        told = {name: texts for part in pool.map(look, parts) for name, texts in part.items()}
    return {name: run_of(built[name], told[name]) for name in cases}


# -- environment files ----------------------------------------------------------------------------------------------------

_SEEN = """
import json, os, pathlib, sys
new = pathlib.Path(sys.argv[1] + ".new")
new.write_text(json.dumps(dict(os.environ)))
new.rename(sys.argv[1])
"""


def environment(case: Case, folder: Path) -> dict[str, Any]:
    """What a process in a session sees of an environment file, and which variables are refused."""
    file, seen, name = folder / "env", folder / "seen.json", f"pins-{os.getpid()}"
    # From a file, so that Ansible takes no value for a template.
    (folder / "case.json").write_text(json.dumps(case), encoding="ascii")
    told = "lookup('ansible.builtin.file', 'case.json') | from_json"
    write = {"path": str(file), "env": f"{{{{ ({told}).env }}}}", "secrets": case["secrets"]}
    session = {
        "name": name,
        "state_dir": str(folder),
        "argv": [sys.executable, "-S", "-c", _SEEN, str(seen)],
        "env_file": str(file),
    }
    value = "{{ {(%s).refused[%d].name: (%s).refused[%d].value} }}"
    refused = [
        {"path": f"{folder}/refused", "env": value % (told, n, told, n), **one.get("more", {})}
        for n, one in enumerate(case["refused"])
    ]
    refused += [{"path": f"{folder}/refused", "env": {"TOO_LONG": "x" * 131072}}]
    tasks: list[dict[str, Any]] = [
        {"nanochat.ddp.env_file": write, "register": "first"},
        {"nanochat.ddp.env_file": write, "register": "again"},
        {"nanochat.ddp.tmux_session": session},
        {"ansible.builtin.wait_for": {"path": str(seen), "timeout": 60}},
        {"nanochat.ddp.tmux_session": {"name": name, "state_dir": str(folder), "state": "absent"}},
        *(
            {"nanochat.ddp.env_file": one, "register": f"refused_{n}", "ignore_errors": True}
            for n, one in enumerate(refused)
        ),
        {"ansible.builtin.debug": {"msg": ["{{ [first, again] | map(attribute='changed') | to_json }}"]}},
        *(
            {"ansible.builtin.debug": {"msg": [f"{{{{ refused_{n}.msg | default('accepted') }}}}"]}}
            for n in range(len(refused))
        ),
    ]
    known = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    play = {"hosts": "desktop", "gather_facts": False, "vars": known, "tasks": tasks}
    [texts] = played(folder, [play], ["desktop"])
    changes, *messages = texts[-1 - len(refused) :]
    arrived = json.loads(seen.read_text(encoding="ascii"))
    return {
        "facts": {
            "changed": json.loads(changes),
            "mode": oct(file.stat().st_mode & 0o7777),
            "arrives": {key: arrived.get(key) == str(value) for key, value in case["env"].items()},
            "besides": sorted(
                key
                for key in arrived
                if key not in case["env"] and key not in {"TMUX", "TMUX_PANE", "TERM", "SHLVL", "_"}
            ),
            "refused": [text != "accepted" for text in messages],
        },
        "sentences": steadied(messages, (str(folder), "FOLDER")),
    }


# -- a training -----------------------------------------------------------------------------------------------------------

_CHECKPOINT = """
import json, pathlib, sys, torch

def shown(value, norms):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype)[6:], list(value.shape), *([float(value.double().norm())] if norms else [])]
    if isinstance(value, dict):  # which library multiplies is found out by timing
        return {str(key): shown(one, norms) for key, one in value.items() if key != "route"}
    return [shown(one, norms) for one in value] if isinstance(value, (list, tuple)) else value

for file in sorted(pathlib.Path(sys.argv[1]).glob("*.pt")):
    found = torch.load(file, map_location="cpu", weights_only=True)
    print(json.dumps({file.name: shown(found, file.name.startswith("model"))}))
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    print(json.dumps({file.name: json.loads(file.read_text())}))
"""
_EVENTS = {
    "start": "rank world dtype matmul steps total_batch_size resumed_from generation model",
    "step": "step loss rows lr_multiplier epoch",
    "eval": "step val_bpb share",
    "sample": "step prompt",
    "digest": "step identical",
    "checkpoint": "step",
    "end": "step reason error cause steps identical val_bpb first_loss last_loss",
}
_META = "step val_bpb model_config user_config device_batch_size max_seq_len total_batch_size dataloader_state_dict"


def training(case: Case, folder: Path, python: str) -> dict[str, Any]:
    """Metrics and checkpoints of a run of two ranks on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    data, processes = ROOT / "tests" / "trainer" / "golden" / "data", []
    for rank in range(2):
        base = folder / f"host{rank}"
        base.mkdir(parents=True)
        (base / "tokenizer").symlink_to(data / "tokenizer")
        known = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT / "trainer"), "OMP_NUM_THREADS": "1",
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "NANOCHAT_BASE_DIR": str(base),
            "NANOCHAT_DATA_DIR": str(data / "base_data_climbmix"),
        }  # fmt: skip
        with (folder / f"rank{rank}.log").open("wb") as log:
            argv = [python, "-m", "scripts.base_train", *case["flags"]]
            processes.append(subprocess.Popen(argv, env=known, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join((folder / f"rank{rank}.log").read_text() for rank in range(2))
    events: dict[str, Any] = {}
    for rank in range(2):
        lines = (folder / f"host{rank}" / f"metrics-rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        told = [event for event in map(json.loads, lines) if event["kind"] in _EVENTS]
        by_kind = {
            kind: [picked(event, names) for event in told if event["kind"] == kind] for kind, names in _EVENTS.items()
        }
        sent = [event["bytes_sent"] for event in told if event["kind"] == "step"]
        events[f"rank {rank}"] = {
            **{kind: found for kind, found in by_kind.items() if found},
            "bytes sent in a step": figure(sum(sent) / len(sent)),
        }
    checkpoints = folder / "host0" / "base_checkpoints" / case["tag"]
    words = subprocess.run(
        [python, "-c", _CHECKPOINT, str(checkpoints)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = {name: content for line in words for name, content in json.loads(line).items()}
    kept = {name: picked(content, _META) if name.endswith(".json") else content for name, content in files.items()}
    return {"facts": rounded({"events": events, "checkpoints": kept})}


def rounded(document: Any) -> Any:
    """All its numbers as figures."""
    if isinstance(document, dict):
        return {key: rounded(value) for key, value in document.items()}
    return [rounded(one) for one in document] if isinstance(document, list) else figure(document)
