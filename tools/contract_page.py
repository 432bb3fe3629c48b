# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes docs/contract.md for tools/generate_docs.py: the documents that parts of the product exchange, from their types in the code."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
UTILS = ROOT / "plugins" / "module_utils"
CONTRACT = UTILS / "_contract"

HEAD = """# The contract

<!-- Written by tools/generate_docs.py from the types in plugins/module_utils and from what trainer and roles write. -->

What collection, hosts and trainer exchange: facts between the steps, the plan, the folders on a host, and what the trainer writes.
[architecture.md](architecture.md) says how the parts use it. A key in *italics* may be missing; "or null" may be unknown.
"""

# Facts that the roles set for the steps after them.
FACTS = {
    "ddp_probe": "this host's [probe](#probe)",
    "ddp_probe_error": "why there is no probe of this host; empty where there is one",
    "ddp_rights": "root's rights on this host: `root`, `passwordless`, `password` (of `-K`) or `none`",
    "ddp_rights_refused": "why the password that was given does not give them here; empty where it does or none was given",
    "ddp_plan": "the whole [plan](#plan), the same on every host, exactly as it is deployed",
    "ddp_plan_findings": "what the plan has to say about the hosts as they are now",
    "ddp_node": "this host's element of `ddp_plan.nodes`",
    "ddp_controller": "[settings](#controller) of what the controller does",
    "ddp_so_far": "`{running, done}`: whether the run is in progress on any host, and whether this very plan has been carried out on all",
    "ddp_launched": "the [training](#launched) that a start is of",
    "ddp_setup": "`{trainer, data}`: which of the two have nothing to bring to any host",
    "ddp_links": "which connections to its peers this host could make, as the module peer_check tells, where they were tried",
    "preflight_findings": "what was found",
    "preflight_prediction": "what speed to expect",
    "find_run_meant": "name of the run that a command is about, the same on every host; empty where no host has one",
    "find_run_found": "what this host has of that run, with `newest_run`, the one that it was started for last",
    "watch_verdicts": "how the run ended or goes on, by host",
    "watch_silent": "the hosts that did not answer when watching ended",
    "doctor_plan": "the plan that was deployed",
    "doctor_verdict": "the doctor's finding, and the lines that it rests on",
}

# Path below the base folder -> meaning; {names} are the constants of _contract/run_folder.py.
BASE_FOLDER = {
    "venv/": "the trainer's Python (ddp_venv_dir)",
    "{PYTHON_FOLDER}/": "a Python that uv made, where the host has none that is new enough: {PYTHON_IN_FOLDER}, marked by {PYTHON_MARK}",
    "trainer/": "the trainer's files, listed in {DEPLOYED}",
    "tools/": "beside another trainer: ours, to make shards, train tokenizers and join its ranks",
    "{MEASURED}": "what a training step takes here, and what the slowest link from here carries",
    "data/ID/": "a data set: shard_00000.parquet ..., tokenizer/, {MANIFEST}",
    "data/ID/.digests.json": "digests already computed, believed while size, time and inode of a file do not change",
    "data/ID/.share/": "while files move between hosts: the server's settings (0700), gone when it has stopped",
    "wheels/PYTHON-MACHINE/": "packages for hosts that reach no index, listed in {WHEELS}, moved between hosts as data sets are",
    "tracker/": "on the master, with ddp_tracker mlflow: the server's Python, database and log",
    "runs/RUN/": "the run folder; NANOCHAT_BASE_DIR of the run",
}
RUN_FOLDER = {
    "{PLAN}": "the plan as it was deployed here",
    "env": "0600, written by env_file, read by a POSIX shell (`set -a; . ./env`)",
    "run.sh": "what the tmux session runs; a person can run it by hand",
    "{SESSION}": "[what became of the session](#session), written by its runner",
    "{SESSION_FILES}/": "the runner itself and what it was last given",
    "{BOOT}": "starts the session again after a reboot; there only while an entry of the system names it",
    "agent-0/": "what torchrun's agent needs while it runs",
    "log/rank0.log": "stdout and stderr of the rank, line by line",
    "data/": "exactly the plan's shards (hard links into the store, symlinks where that fails)",
    "tokenizer/": "the same for the tokenizer",
    "base_data_climbmix, base_data": "names by which other trainers know data/ (links, only for those)",
    "metrics-rank0.jsonl": "[one line an event](#metrics)",
    "heartbeat-rank0.json": "[renewed every second](#heartbeat) while the trainer lives",
    "hang-up-rank0, dump-request-rank0, dump-rank0.json": "ask a rank to close its connections, or to say where it is, and its answer",
    "nanochat_RUN_rank0.prom": "in NANOCHAT_PROM_DIR, where that is set: for node_exporter",
    "tracker.json": "the run's name at the tracker, where there is one",
    "{CHECKPOINTS}/RUN/": "checkpoints, upstream's names and contents; ours are read by its loaders, its by ours, optimizer included",
    "{CONVERSATIONS}, {HELD_OUT}": "what a fine-tuning learns from, and what it is evaluated on",
    "report/": "what the report of older nanochat checkouts writes",
    "{TRAINING_FILE}": "[which training](#trainingjson) the folder holds",
    "{KEEPER_FOLDER}/": "0700, with ddp_restarts: the keeper's program, its settings with the secret of this start, and what outlives it",
    "{KEEPER_FOLDER}/{KEEPER_LEAVE}": "asks the keeper to leave the run",
    "{KEEPER_FOLDER}/{KEEPER_JOIN}": "lets a guest in that stays away by itself (ddp_polite)",
    "{MEMBERS}, {MEMBER_EVENTS}": "who trains, by this host's keeper: now, and event by event ([membership.md](membership.md))",
    "{APART}/": "checkpoints of the losing part of a split run",
    "{PREVIOUS}/1/, {PREVIOUS}/2/": "what fresh starts set aside, each with its plan; never replaced or removed",
}

# Kind of event -> key -> meaning, where the name does not say it. All have kind, time (seconds since 1970) and step.
EVENTS: dict[str, dict[str, str]] = {
    "start": {
        "rank": "", "world": "", "run": "", "model": "config, parameter counts and flops_per_token", "settings": "",
        "dtype": "", "dtype_reason": "", "matmul": "", "kernels": "names of the kernels in use",
        "capability": "torch's vectors on a CPU, such as AVX2 or AVX512",
        "steps": "null of an evaluation", "total_batch_size": "",
        "resumed_from": "step or null", "notices": "what the user should know of the start, such as a damaged newer checkpoint",
        "attempt_id": "the same on all ranks", "training": "its id",
        "base": "the training of the base model", "generation": "that of the keepers, or null",
        "opening": "when the process began, and when all ranks had met",
        "ends": "only of a timed run: when it is to be over, in seconds since 1970 by this host's clock",
    },
    "step": {
        "loss": "mean over ranks", "loss_smooth": "", "seconds": "",
        "tokens_per_second": "of all ranks", "forward_backward_seconds": "", "wait_seconds": "", "optimizer_seconds": "",
        "data_seconds": "", "bytes_sent": "", "memory_bytes": "", "lr_multiplier": "", "epoch": "", "rows": "of this rank in the step",
        "share": "only of a timed run: how much of its time was used before the step, from 0 to 1",
        "steps": "only of a timed run: the steps that it comes to at this pace",
    },
    "eval": {"val_bpb": "", "seconds": "", "share": "how much of the schedule was done, from 0 to 1"},
    "shares": {
        "rows": "", "head": "weights of the parts; empty of a whole head", "before": "", "before_head": "",
        "speeds": "parts of their sum", "seconds": "",
    },
    "sample": {"prompt": "", "text": ""},
    "digest": {"digest": "", "identical": ""},
    "checkpoint": {"path": "", "bytes": "", "seconds": "", "alone": "saved by a rank that lost the others"},
    "end": {
        "reason": "finished, stopped or error", "error": "", "cause": "a code, see architecture.md",
        "blames": "ranks at fault, as far as is known", "seconds": "", "steps": "", "identical": "", "val_bpb": "", "first_loss": "",
        "last_loss": "", "tokens_per_second": "", "wait_seconds": "",
    },
}  # fmt: skip
HEARTBEAT = {
    "time": "the process lives", "pid": "", "rank": "", "world": "", "step": "", "steps": "",
    "phase": "start, rendezvous, agree, resume, data, forward_backward, head, sync, optimizer, eval, sample, save, share or end",
    "phase_since": "it makes progress", "collective": "", "batch": "of an evaluation", "batches": "",
    "step_seconds": "the mean of a step here (null before the first)", "save_seconds": "what the last checkpoint took with its proof",
    "oom_kills": "the kernel's count of processes that it killed",
}  # fmt: skip


class Field(NamedTuple):
    """A key of a document."""

    name: str
    kind: str
    note: str
    optional: bool


class Document(NamedTuple):
    """A type of the code."""

    name: str
    about: str
    bases: list[str]
    fields: list[Field]


def documents(path: Path) -> dict[str, Document]:
    """The types of a file by name, with the comments behind their keys."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        missing = any(word.arg == "total" for word in node.keywords)
        fields = [
            Field(one.target.id, kind(one.annotation), lines[one.lineno - 1].partition("  # ")[2], missing)
            for one in node.body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        about = " ".join((ast.get_docstring(node) or "").split())
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        found[node.name] = Document(node.name, about, bases, fields)
    return found


@functools.cache
def checked_values() -> dict[str, ast.expr]:
    """The types of values.py, each with the plain type that its check is of."""
    nodes = ast.parse((CONTRACT / "values.py").read_text(encoding="utf-8")).body
    named = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    return {
        name.id: value.slice.elts[0]
        for name, value in named
        if isinstance(name, ast.Name) and isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Tuple)
    }


def kind(annotation: ast.expr) -> str:
    """A type as people read it."""
    if isinstance(annotation, ast.Subscript):
        outer = annotation.value.id if isinstance(annotation.value, ast.Name) else ""
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        last = kind(inner[-1])
        named = {"optional": f"{last} or null", "list": f"list of {last}", "dict": f"{last} by name"}
        return named.get(outer.lower(), last)
    if isinstance(annotation, ast.BinOp):
        return f"{kind(annotation.left)} or null"
    name = annotation.id if isinstance(annotation, ast.Name) else "any"
    if name in checked_values():
        return kind(checked_values()[name])
    plain = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "object": "any",
        "Any": "any",
        "Document": "any document",
        "TrainingIdentity": "[Training](#trainingjson)",
    }
    return plain.get(name, f"[{name}](#{name.lower()})")


def all_fields(document: Document, of_file: dict[str, Document]) -> Iterator[Field]:
    """The keys of a type, those of its bases first."""
    for name in document.bases:
        if name in of_file:
            yield from all_fields(of_file[name], of_file)
    yield from document.fields


def table(document: Document, of_file: dict[str, Document]) -> Iterator[str]:
    """A section for a type."""
    yield from (f"### {document.name}", "", document.about, "", "| key | is | |", "|---|---|---|")
    for field in all_fields(document, of_file):
        name = f"*{field.name}*" if field.optional else field.name
        yield f"| {name} | {field.kind} | {field.note} |"
    yield ""


def of_types(file: str, *names: str) -> Iterator[str]:
    """Sections for the types of a file: those that are named, or all that are no mere parts of others."""
    found = documents(UTILS / file)
    parts = {base for one in found.values() for base in one.bases if base in found}
    for name in names or [name for name in found if name not in parts]:
        yield from table(found[name], found)


def facts() -> Iterator[str]:
    """The facts and the roles that set them; a fact without a description is an error."""
    told: dict[str, set[str]] = {}
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        for task in yaml.safe_load(path.read_text(encoding="utf-8")):
            for name in [*task.get("ansible.builtin.set_fact", {}), task.get("register", "__")]:
                if not name.startswith(("__", "ansible_")) and name != "cacheable":
                    told.setdefault(name, set()).add(path.parts[-3])
    expect("FACTS", set(FACTS), set(told))
    yield from ("## Facts that travel between the steps", "", "| fact | set by role | is |", "|---|---|---|")
    for name, meaning in FACTS.items():
        yield f"| `{name}` | {', '.join(sorted(told[name]))} | {meaning} |"
    yield ""


def folders() -> Iterator[str]:
    """The trees below the base folder; a name of run_folder.py that is in none of them is an error."""
    names: dict[str, str] = {}
    for node in ast.parse((CONTRACT / "run_folder.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            value: Any = ast.literal_eval(node.value) if is_literal(node.value) else None
            values = value if isinstance(node.targets[0], ast.Tuple) else [value]
            names.update(
                {t.id: v for t, v in zip(targets, values or [], strict=False) if isinstance(t, ast.Name) and v}
            )
    stages = runpy.run_path(str(ROOT / "trainer" / "nanochat" / "rules" / "stages.py"))["STAGES"].values()
    names["CHECKPOINTS"] = ", ".join(stage.folder for stage in stages if stage.trains)
    no_files = {"TOKENIZER", "GIVEN_NAME", "RUN_NAME", "RUN_NAME_HELP", "TELLING", *INSIDE_KEEPER}
    used = set(
        re.findall(r"{(\w+)}", " ".join([*BASE_FOLDER, *BASE_FOLDER.values(), *RUN_FOLDER, *RUN_FOLDER.values()]))
    )
    expect("BASE_FOLDER and RUN_FOLDER", used, set(names) - no_files)
    plain = {name: value if isinstance(value, str) else ", ".join(value) for name, value in names.items()}
    for title, tree in (("base folder (ddp_base_dir)", BASE_FOLDER), ("run folder", RUN_FOLDER)):
        yield from (f"## The {title}", "", "| path | holds |", "|---|---|")
        yield from (f"| `{path.format(**plain)}` | {meaning.format(**plain)} |" for path, meaning in tree.items())
        yield ""


INSIDE_KEEPER = {"KEEPER_PROGRAM", "KEEPER_SETTINGS", "KEEPER_MEMORY"}


def is_literal(node: ast.expr) -> bool:
    return all(isinstance(part, (ast.Constant, ast.Tuple, ast.Load)) for part in ast.walk(node))


def told_by_trainer() -> dict[str, set[str]]:
    """The keys of every event that the trainer's code names, by kind; and those of the heartbeat, by "heartbeat"."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.args
                and node.func.attr in ("record", "write")
            ):
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and len(node.args) == 2:
                    found.setdefault(first.value, set()).update(word.arg for word in node.keywords if word.arg)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "beat":
                keys = node.value.keys if isinstance(node.value, ast.Dict) else []
                found["heartbeat"] = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return found


def metrics() -> Iterator[str]:
    """The events of the trainer; a key that its code names and this page does not is an error."""
    told = told_by_trainer()
    expect("HEARTBEAT", set(HEARTBEAT), told.pop("heartbeat"))
    expect("EVENTS", set(EVENTS), set(told))
    for name, keys in told.items():
        if keys - set(EVENTS[name]):
            raise SystemExit(
                f"tools/contract_page.py: EVENTS lacks {', '.join(sorted(keys - set(EVENTS[name])))} of {name}."
            )
    yield from (
        "### Metrics",
        "",
        "`metrics-rankN.jsonl`: a JSON object a line, always with `kind`, `time` (seconds since 1970), `step`.",
        "",
    )
    yield from ("| kind | further keys |", "|---|---|")
    for name, meanings in EVENTS.items():
        yield f"| {name} | {', '.join(keyed(meanings))} |"
    yield from ("", "### Heartbeat", "", f"`heartbeat-rankN.json`: {', '.join(keyed(HEARTBEAT))}.", "")


def keyed(meanings: dict[str, str]) -> Iterator[str]:
    for key, meaning in meanings.items():
        yield f"`{key}` ({meaning})" if meaning else f"`{key}`"


def expect(table_name: str, here: set[str], there: set[str]) -> None:
    """A table of this file has to have the names of the code, and no others."""
    if here != there:
        raise SystemExit(
            f"tools/contract_page.py: {table_name} differs from the code in {', '.join(sorted(here ^ there))}."
        )


def page() -> str:
    """docs/contract.md."""
    lines = [HEAD, *facts()]
    lines += [
        "## The plan (`plan.json`)",
        "",
        *of_types("_contract/plan.py", "Plan", "Master", "Ports", "Model", "Training", "Data", "Trainer"),
    ]
    lines += of_types("_contract/plan.py", "Keeper", "Guest", "Node", "Stage", "Conversations", "Controller")
    lines += ["## The facts of a host (`ddp_probe`)", "", *of_types("_contract/probe.py", "Probe")]
    lines += of_types("_contract/probe.py", *rest_of_probe())
    lines += ["## The state of a run on a host (`run_info`)", "", *run_state()]
    lines += ["## The link to a peer (`peer_check`)", "", *of_types("_preflight/peer_check.py", "LinkTry", "PortTry")]
    lines += folders()
    lines += [
        "## Documents in these folders",
        "",
        *renamed(of_types("_session/record.py", "Record"), "Record", "Session"),
    ]
    lines += renamed(
        of_types("_contract/training.py", "TrainingIdentity", "Launched", "Curve"), "TrainingIdentity", "training.json"
    )
    lines += of_types("_contract/manifest.py", "Manifest", "ManifestFile")
    lines += ["## What the trainer writes", "", *metrics()]
    return "\n".join(lines).rstrip() + "\n"


def run_state() -> Iterator[str]:
    """The result of run_info; its types stand in several files."""
    files = ("metrics", "members", "evaluated", "ending", "state")
    found = {name: one for file in files for name, one in documents(UTILS / "_run" / f"{file}.py").items()}
    for name in (
        "RunState",
        "Membership",
        "AwayHost",
        "GaveWay",
        "Kept",
        "Previous",
        "Checkpoint",
        "StageOf",
        "Expected",
    ):
        yield from table(found[name], found)


def rest_of_probe() -> list[str]:
    found = documents(CONTRACT / "probe.py")
    return [name for name in found if name not in ("Probe", "Pythons") and not name.startswith("_")]


def renamed(lines: Iterator[str], old: str, new: str) -> Iterator[str]:
    for line in lines:
        yield line.replace(f"### {old}", f"### {new}")
