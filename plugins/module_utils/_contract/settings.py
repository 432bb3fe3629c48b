# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every setting of a job: one table of names, types, defaults and reasons, and the reading of inventory variables by it.

inventory/group_vars/trainers.yml and docs/settings.md are kept in step with this table by a test.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import Finding, finding, refusal_text
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RUN_NAME, RUN_NAME_HELP

RUN = "run"
HOST = "host"

DATA_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"

# Facts and switches of the collection's own that share the prefix and are no settings.
NOT_SETTINGS = frozenset(
    [
        "ddp_probe",
        "ddp_probe_error",
        "ddp_plan",
        "ddp_node",
        "ddp_plan_findings",
        "ddp_controller",
        "ddp_tolerant",
        "ddp_plan_file",
        "ddp_json",
        "ddp_rights",
        "ddp_purge",
    ]
)
ALIASES = {"watch": "ddp_watch"}


class SettingsError(ValueError):
    """All that is wrong with the settings, as findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        super().__init__(refusal_text(self.findings))


class Setting(NamedTuple):
    """One variable that an inventory may set."""

    name: str
    kind: str  # str, int, float, bool, list, dict, range
    default: Any  # None: from the profile or worked out by the plan
    scope: str
    why: str
    section: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    pattern: str = ""
    empty: str = ""  # what an unset value means


def _rows(section: str, scope: str, *rows: tuple[str, str, Any, dict[str, Any], str]) -> list[Setting]:
    return [Setting(name, kind, default, scope, why, section, **more) for name, kind, default, more, why in rows]


_PROFILE = "from the profile"

# fmt: off
SETTINGS: list[Setting] = [
    *_rows(
        "The run", RUN,
        ("ddp_profile", "str", "smoke", {"choices": ("smoke", "real")},
         "Where settings that are left empty come from: a ten-step trial, or the real training."),
        ("ddp_run", "str", None, {"pattern": RUN_NAME, "empty": "d and the depth, for example d4"},
         "The name of the run, of its folder and of its sessions on every host."),
        ("ddp_resume", "bool", True, {},
         "Go on from the newest checkpoint that every rank has, so that an interruption costs little."),
        ("ddp_fresh", "bool", False, {},
         "Start anew: what the run wrote before is kept in its folder, in previous/1, previous/2 and so on."),
        ("ddp_strict", "bool", False, {},
         "Stop before training also when preflight has only warnings."),
        ("ddp_timeout", "int", 300, {"low": 10},
         "Seconds after which a rank that does not come is named and the run ends; every wait derives from it."),
        ("ddp_restarts", "int", 0, {"low": 0},
         "Restarts by itself in an hour, from what was saved; a keeper on each host sees to them. 0 for no keepers."),
        ("ddp_min_hosts", "int", 0, {"low": 0},
         "With ddp_restarts: go on without lost hosts while so many are left, and let them in again; 0 for all."),
        ("ddp_grace", "int", 30, {"low": 0},
         "With ddp_restarts: seconds that a lost host is waited for before the others go on without it."),
    ),
    *_rows(
        "The model", RUN,
        ("ddp_depth", "int", None, {"low": 1, "empty": _PROFILE},
         "Transformer layers; the one dial of the model's size."),
        ("ddp_aspect_ratio", "int", None, {"low": 1, "empty": _PROFILE},
         "Width of the model for each layer."),
        ("ddp_head_dim", "int", None, {"low": 2, "empty": _PROFILE},
         "Width of an attention head; the model's width is rounded up to a multiple of it."),
        ("ddp_sequence", "int", None, {"low": 2, "empty": _PROFILE},
         "Tokens in a row of the batch."),
        ("ddp_window_pattern", "str", "SSSL", {"pattern": "[SLsl]+"},
         "Attention windows over the layers: L sees the whole sequence, S a quarter; the last layer is always L."),
        ("ddp_vocab_size", "int", None, {"low": 265, "empty": _PROFILE},
         "Size of the tokenizer that is trained where the data has none."),
    ),
    *_rows(
        "The training", RUN,
        ("ddp_device_batch", "int", None, {"low": 1, "empty": "the profile's, or less where the hosts share rows better so"},
         "Rows in one pass through the model; more need more memory."),
        ("ddp_total_batch", "int", None, {"low": 1, "empty": "about the profile's, as the number of hosts divides it"},
         "Tokens in one step over all ranks."),
        ("ddp_iterations", "int", None, {"low": 1, "empty": _PROFILE},
         "Steps of the whole run."),
        ("ddp_batch_split", "str", "auto", {"choices": ("auto", "equal", "threads", "speed")},
         "How a step's rows are shared out: equally, by threads, by speed (ddp_speed or as measured), or auto: by speed where known."),
        ("ddp_eval_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two measurements on the validation shard; -1 for none."),
        ("ddp_eval_tokens", "int", None, {"low": 1, "empty": _PROFILE},
         "Tokens of one such measurement."),
        ("ddp_sample_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two samples of generated text; -1 for none."),
        ("ddp_save_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two checkpoints; -1 for one at the end only."),
        ("ddp_keep_checkpoints", "int", 2, {"low": -1},
         "Checkpoints that stay on each host; -1 keeps all of them."),
        ("ddp_sync", "str", "exact", {"choices": ("exact", "bf16", "int8", "int4", "dense", "ddp")},
         "What gradients travel as: float32, bf16, 8 or 4 bits, or the plain dense and DistributedDataParallel baselines."),
        ("ddp_local_steps", "int", 0, {"low": 0},
         "For slow links: steps that each rank makes apart before all take the mean of what they changed; 0 for none."),
        ("ddp_head", "str", "auto", {"choices": ("auto", "whole", "shared")},
         "The head: whole (its gradient travels), shared (each host has a part of the vocabulary), or auto: what sends less."),
        ("ddp_matmul", "str", "fp32", {"choices": ("auto", "fp32", "bf16")},
         "Precision of the matrix products; bf16 is faster where the CPU has it, and less exact."),
        ("ddp_dtype", "str", "auto", {"choices": ("auto", "float32", "bfloat16", "float16")},
         "Type of the activations; auto is float32 on CPUs, also where a GPU is present."),
        ("ddp_device", "str", "cpu", {"choices": ("auto", "cpu", "cuda")},
         "What computes; auto takes the GPUs where every host has one."),
        ("ddp_extra_args", "list", [], {},
         "Further arguments of the training command, for example a learning rate."),
        ("ddp_extra_env", "dict", {}, {},
         "Further environment of the training processes."),
        ("ddp_secret_env", "dict", {}, {},
         "The same, but masked wherever it would be shown, for example WANDB_API_KEY."),
    ),
    *_rows(
        "The network", RUN,
        ("ddp_port", "int", 29500, {"low": 1024},
         "Port of the master at which the ranks meet."),
        ("ddp_keeper_port", "int", 29501, {"low": 1024},
         "With ddp_restarts: the port of each host's keeper; hosts on one machine take the ports that follow."),
        ("ddp_port_range", "range", None, {"empty": "all of the hosts' local ports"},
         "Narrows the hosts' local ports, on which Gloo listens, to LOW-HIGH, so that fewer need to be opened."),
        ("ddp_manage_firewall", "bool", True, {},
         "Let the peers, and only them, through a firewall that is in force."),
    ),
    *_rows(
        "The trainer", RUN,
        ("ddp_trainer_source", "str", "ours", {},
         "What trains: this collection's trainer, the path of a nanochat checkout here, or a git URL."),
        ("ddp_trainer_offline", "bool", False, {},
         "The hosts have no way to a package index: packages are fetched once and handed on."),
        ("ddp_torch", "str", "2.13.0", {"pattern": r"\d+\.\d+(\.\d+)?[A-Za-z0-9.+]*"},
         "Version of PyTorch on every host; ranks of different versions may disagree."),
        ("ddp_torch_index", "str", "auto", {"pattern": r"auto|default|https?://\S+|file://\S+"},
         "Where torch comes from: PyTorch's own CPU index when it answers (auto), the default index (default), or a URL."),
    ),
    *_rows(
        "The data", RUN,
        ("ddp_data_source", "str", None, {"choices": ("text", "url", "host", "controller"), "empty": _PROFILE},
         "Text of a host made into shards, numbered shards at a URL, or shards of a host or of the controller."),
        ("ddp_data_host", "str", None, {"empty": "the master"},
         "The host that has the text or the shards, or downloads them; the others get them from it."),
        ("ddp_data_paths", "list", [], {},
         "There, or on the controller: folders of text (or Python's library), or one of shards and, if elsewhere, its tokenizer's."),
        ("ddp_data_url", "str", DATA_URL, {"pattern": r"https?://\S+"},
         "Where numbered shards lie (source url)."),
        ("ddp_data_shards", "int", None, {"low": 2, "empty": _PROFILE},
         "Shards of the run, the last of them for validation."),
        ("ddp_data_last_shard", "int", 6542, {"low": 1},
         "Number of the collection's last shard, which is the one for validation (source url)."),
    ),
    *_rows(
        "Watching and collecting", RUN,
        ("ddp_watch", "bool", True, {},
         "Follow the run to its end; without, the play returns after the first step of every rank."),
        ("ddp_stall_factor", "float", 5.0, {"low": 1.5},
         "A run that takes this many usual steps for one is examined."),
        ("ddp_results_dir", "str", "runs", {},
         "Folder on the controller for what is brought back."),
        ("ddp_collect_checkpoints", "bool", True, {},
         "Bring the newest checkpoint back too."),
        ("ddp_tracker", "str", "none", {"choices": ("none", "mlflow", "wandb")},
         "Where the master also reports metrics."),
        ("ddp_tracker_port", "int", 5000, {"low": 1024},
         "Port of the MLflow server on the master."),
        ("ddp_tracker_bind", "str", "127.0.0.1", {},
         "Address that the MLflow server listens on; it has no password of its own."),
    ),
    *_rows(
        "Each host", HOST,
        ("ddp_base_dir", "str", "~/nanochat-ddp", {"pattern": "[/~].*"},
         "Folder of everything that a job keeps on this host."),
        ("ddp_venv_dir", "str", None, {"pattern": "[/~].*", "empty": "venv in the base folder"},
         "The trainer's Python; nodes on one machine may share it."),
        ("ddp_python", "str", None, {"pattern": "[/~].*", "empty": "one that all hosts have, if there is one"},
         "Python 3.10 or newer that the trainer's is made with."),
        ("ddp_address", "str", None, {"empty": "that of the NIC that leads to them"},
         "Address by which the peers reach this host."),
        ("ddp_nic", "str", None, {"empty": "the one that leads to the peers"},
         "Network interface that carries the training."),
        ("ddp_rank", "int", None, {"low": 0, "empty": "by the order of the inventory"},
         "Rank of this host; 0 is the master."),
        ("ddp_threads", "int", None, {"low": 1, "empty": "the physical cores this user may use"},
         "Threads that compute."),
        ("ddp_cores", "str", None, {"pattern": r"\d+(-\d+)?(,\d+(-\d+)?)*", "empty": "the set that the rehearsal finds fastest"},
         "Processors that compute, such as 0-7; without ddp_threads as many threads as there are of them."),
        ("ddp_speed", "float", None, {"low": 0.001, "empty": "as measured"},
         "Speed of this host against the others (ddp_batch_split auto and speed)."),
    ),
]
# fmt: on

TABLE: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}

PROFILES: dict[str, dict[str, Any]] = {
    "smoke": {
        "ddp_depth": 4,
        "ddp_aspect_ratio": 64,
        "ddp_head_dim": 64,
        "ddp_sequence": 512,
        "ddp_vocab_size": 4096,
        "ddp_device_batch": 2,
        "ddp_total_batch": 2048,
        "ddp_iterations": 10,
        "ddp_eval_every": 250,
        "ddp_eval_tokens": 16384,
        "ddp_sample_every": -1,
        "ddp_save_every": 5,
        "ddp_data_source": "text",
        "ddp_data_shards": 3,
    },
    "real": {
        "ddp_depth": 8,
        "ddp_aspect_ratio": 64,
        "ddp_head_dim": 128,
        "ddp_sequence": 1024,
        "ddp_vocab_size": 32768,
        "ddp_device_batch": 2,
        "ddp_total_batch": 4096,
        "ddp_iterations": 5000,
        "ddp_eval_every": 250,
        "ddp_eval_tokens": 65536,
        "ddp_sample_every": 1000,
        "ddp_save_every": 250,
        "ddp_data_source": "url",
        "ddp_data_shards": 8,
    },
}

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


# Beyond these a plan would be worked out for ever, or describes no machine that there is.
MOST = {
    "ddp_depth": 1000,
    "ddp_aspect_ratio": 10_000,
    "ddp_head_dim": 10_000,
    "ddp_sequence": 10_000_000,
    "ddp_vocab_size": 10_000_000,
    "ddp_device_batch": 100_000,
    "ddp_data_shards": 100_000,
    "ddp_data_last_shard": 10_000_000,
    "ddp_threads": 10_000,
    "ddp_rank": 10_000,
    "ddp_timeout": 1_000_000,
}
MOST_OF_ALL = 2**31


def _as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("not a number")
    if isinstance(value, float) and value != int(value):
        raise ValueError("not whole")
    return int(value.strip().replace("_", "")) if isinstance(value, str) else int(value)


def _as_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _as_bool(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError("neither true nor false")


def _as_str(value: Any) -> str:
    if isinstance(value, (bool, list, dict)):
        raise ValueError("not a word")
    return str(value).strip()


def _as_list(value: Any) -> list[str]:
    if isinstance(value, str):
        value = _list_in(value) if value.lstrip().startswith("[") else [value]
    if not isinstance(value, (list, tuple)) or any(isinstance(item, (list, dict)) for item in value):
        raise ValueError("not a list of words")
    return [str(item) for item in value]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested without end") from None


def _list_in(text: str) -> Any:
    """A list as people type it after -e, in JSON or with single quotes."""
    try:
        return _json(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("not a list") from None


def _as_dict(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        value = _json(value)
    if not isinstance(value, Mapping):
        raise ValueError("not a dictionary")
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{str(name)!r} is no name of an environment variable")
    return {str(name): _env_value(item) for name, item in value.items()}


def _env_value(item: Any) -> str:
    """As it stands in the inventory: what YAML takes for true is written as true."""
    if isinstance(item, (list, dict)):
        raise ValueError("a value is a list or a dictionary; put it in quotes as it should arrive")
    if isinstance(item, bool):
        return "true" if item else "false"
    return "" if item is None else str(item)


def _as_range(value: Any) -> list[int]:
    if isinstance(value, str):
        value = re.split(r"\s*[-:,]\s*", value.strip().strip("[]"))
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("not LOW-HIGH")
    low, high = _as_int(value[0]), _as_int(value[1])
    if not 1024 <= low < high <= 65535:
        raise ValueError("not within 1024-65535")
    if high - low < 99:
        raise ValueError("fewer than 100 ports")
    return [low, high]


CONVERT: dict[str, Callable[[Any], Any]] = {
    "int": _as_int,
    "float": _as_float,
    "bool": _as_bool,
    "str": _as_str,
    "list": _as_list,
    "dict": _as_dict,
    "range": _as_range,
}
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "list": "a list",
    "dict": "a dictionary of environment variables",
    "range": "LOW-HIGH with at least 100 ports between 1024 and 65535, for example 40000-40999",
}
PATTERN_HELP = {
    "ddp_run": RUN_NAME_HELP,
    "ddp_window_pattern": "the letters S and L, for example SSSL",
    "ddp_torch": "a version, for example 2.13.0",
    "ddp_torch_index": "auto, default, or a URL",
    "ddp_data_url": "a URL that begins with http:// or https://",
    "ddp_base_dir": "an absolute path, or one that begins with ~",
    "ddp_venv_dir": "an absolute path, or one that begins with ~",
    "ddp_python": "an absolute path, or one that begins with ~",
}


def wanted(setting: Setting) -> str:
    """What would do, in words."""
    if setting.choices:
        return " or ".join([", ".join(setting.choices[:-1]), setting.choices[-1]])
    if setting.name in PATTERN_HELP:
        return PATTERN_HELP[setting.name]
    if setting.low is not None:
        return f"{WANTED[setting.kind]} of at least {setting.low:g}"
    return WANTED[setting.kind]


def convert(setting: Setting, value: Any) -> Any:
    """The value as its type; raises ValueError where it is none."""
    result = CONVERT[setting.kind](value)
    if setting.choices and result not in setting.choices:
        raise ValueError("not a choice")
    if setting.pattern and not re.fullmatch(setting.pattern, result):
        raise ValueError("malformed")
    if setting.low is not None and result < setting.low:
        raise ValueError("too small")
    most = MOST.get(setting.name, MOST_OF_ALL)
    if setting.kind in ("int", "float") and result > most:
        raise ValueError(f"at most {most}")
    if setting.kind in ("str", "list", "dict") and not _is_text(result):
        raise ValueError("a NUL byte or half a character, which no path and no name can hold")
    if setting.name.endswith("_port") and result > 65535:
        raise ValueError("no such port")
    return result


def _is_text(value: Any) -> bool:
    """Whether programs can be given it; a value of the environment is looked at where it is written."""
    texts = [value] if isinstance(value, str) else list(value)
    try:
        for text in texts:
            text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return not any("\0" in text for text in texts)


def is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def shown(setting: Setting, value: Any) -> str:
    """The value as a message may show it."""
    if setting.name == "ddp_secret_env":
        return "(hidden)"
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__} that is nested without end or too long"
    return text if len(text) <= 80 else text[:77] + "..."


WHERE = "\0"


class Problem(NamedTuple):
    """What is wrong on one host; WHERE in the text is where the hosts go that have it alike."""

    host: str
    text: str


def read_host(host: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """(the settings that this host gives, problems); unset ones are left out."""
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in sorted(variables):
        target = ALIASES.get(name, name)
        if not target.startswith("ddp_") or target in NOT_SETTINGS:
            continue
        setting = TABLE.get(target)
        if setting is None:
            problems.append(Problem(host, unknown(name)))
        elif not is_unset(variables[name]):
            try:
                given[target] = convert(setting, variables[name])
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                problems.append(Problem(host, refused(setting, name, variables[name], error)))
    return given, problems


def refused(setting: Setting, name: str, value: Any, error: Exception) -> str:
    told = setting.kind in ("dict", "range", "list") or str(error).startswith(("at most", "a NUL"))
    reason = f" ({error})" if told else ""
    return f"{name} is {shown(setting, value)}{WHERE}{reason}; it must be {wanted(setting)}."


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, list(TABLE), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists all settings."
    return f"{name}{WHERE} is not a setting of nanochat.ddp; {hint}"


def _told(problems: Sequence[Problem], hosts: int) -> list[Finding]:
    """One finding for what several hosts have alike, as they do where a variable of their group is wrong."""
    having: dict[str, list[str]] = {}
    for problem in problems:
        having.setdefault(problem.text, []).append(problem.host)
    found = []
    for text, names in having.items():
        where = " on every host" if len(names) == hosts > 1 else " on " + ", ".join(names)
        host = names[0] if len(names) == 1 else ""
        found.append(finding("setting-refused", host, text.replace(WHERE, where).rstrip(".")))
    return found


def defaults(profile: str) -> dict[str, Any]:
    """Every setting as it is when nothing is said but the profile."""
    values = {setting.name: setting.default for setting in SETTINGS}
    values.update(PROFILES[profile])
    values["ddp_profile"] = profile
    return values


def resolve(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(settings of the run, {host: settings of the host}); raises SettingsError with every problem of every host."""
    problems: list[Problem] = []
    given: dict[str, dict[str, Any]] = {}
    for host, variables in hosts:
        given[host], wrong = read_host(host, variables)
        problems.extend(wrong)
    run_given, differing = _agree(given)
    if problems or differing:
        raise SettingsError(_told(problems, len(hosts)) + ([] if problems else differing))
    values = defaults(run_given.get("ddp_profile", "smoke"))
    values.update(run_given)
    run = {name: value for name, value in values.items() if TABLE[name].scope == RUN}
    of_host = {name: value for name, value in values.items() if TABLE[name].scope == HOST}
    each = {
        host: dict(of_host, **{name: value for name, value in own.items() if TABLE[name].scope == HOST})
        for host, own in given.items()
    }
    return run, each


def told(hosts: Sequence[tuple[str, Mapping[str, Any]]]) -> set[str]:
    """The settings that somebody made, wherever."""
    return {name for host, variables in hosts for name in read_host(host, variables)[0]}


def _agree(given: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[Finding]]:
    """The settings of the run, which every host must give alike."""
    agreed: dict[str, Any] = {}
    problems: list[Finding] = []
    hosts = list(given)
    for setting in SETTINGS:
        if setting.scope != RUN:
            continue
        values = [given[host].get(setting.name) for host in hosts]
        other = next((at for at, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            seen = "{} is {} on {} but {} on {}; it belongs to the whole run: set it for the group".format(
                setting.name,
                shown(setting, values[0]) if values[0] is not None else "not set",
                hosts[0],
                shown(setting, values[other]) if values[other] is not None else "not set",
                hosts[other],
            )
            problems.append(finding("setting-refused", "", seen))
        elif values and values[0] is not None:
            agreed[setting.name] = values[0]
    return agreed, problems
