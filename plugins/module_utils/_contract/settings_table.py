# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every setting of a job: one table of names, types, defaults and reasons, and the profiles.

inventory/group_vars/trainers.yml and docs/settings.md are kept in step with this table by a test.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RUN_NAME

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
        "ddp_so_far",
        "ddp_launched",
        "ddp_setup",
        "ddp_purge",
    ]
)
ALIASES = {"watch": "ddp_watch"}


# Values by the names of settings; TABLE says what each may be, and nothing that it does not allow gets in.
Settings = Dict[str, Any]


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
    word: str = ""  # what is taken beside values of the kind


def _rows(section: str, scope: str, *rows: tuple[str, str, Any, dict[str, Any], str]) -> list[Setting]:
    return [Setting(name, kind, default, scope, why, section, **more) for name, kind, default, more, why in rows]


_PROFILE = "from the profile"

# fmt: off
SETTINGS: list[Setting] = [
    *_rows(
        "The run", RUN,
        ("ddp_profile", "str", "smoke", {"choices": ("smoke", "real")},
         "Where settings that are left empty come from: a ten-step trial, or the real training."),
        ("ddp_stage", "str", "base", {"choices": ("base", "mid", "sft", "eval")},
         "base trains a model; in runs NAME-STAGE sft fine-tunes it, eval measures it, and mid runs a checkout's mid_train.py."),
        ("ddp_run", "str", None, {"pattern": RUN_NAME, "empty": "d and the depth, for example d4"},
         "The name of the run, of its folder and of its sessions on every host."),
        ("ddp_resume", "bool", True, {},
         "Go on from the newest checkpoint that any host has, so that an interruption costs little."),
        ("ddp_fresh", "bool", False, {},
         "Start from scratch: what the run wrote before is kept in its folder, in previous/1, previous/2 and so on."),
        ("ddp_training", "str", None, {"pattern": "[0-9a-f]{16}", "empty": "the newest"},
         "Where hosts hold different trainings of the run: the id of the one to go on with."),
        ("ddp_strict", "bool", False, {},
         "Stop before training also when preflight has only warnings."),
        ("ddp_timeout", "int", 300, {"low": 10},
         "Seconds after which a rank that does not come is named and the run ends; every wait derives from it."),
        ("ddp_restarts", "int", None, {"low": 0, "empty": "3 with ddp_profile=real, where the trainer can; 0 else"},
         "Restarts by itself in an hour, from what was saved; a keeper on each host sees to them. 0 for no keepers."),
        ("ddp_min_hosts", "int", 0, {"low": 0},
         "With ddp_restarts: go on without lost hosts while so many are left, and let them in again; 0 for all."),
        ("ddp_grace", "int", 30, {"low": 0},
         "With ddp_restarts: seconds that a lost host is waited for before the others go on without it."),
        ("ddp_survive_reboot", "bool", False, {},
         "With ddp_restarts: a host takes part again by itself after a reboot, by a systemd user unit or crontab."),
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
        ("ddp_device_batch", "int", None, {"low": 1, "empty": "the profile's, or what suits the hosts' shares"},
         "Rows in one pass through the model; more need more memory."),
        ("ddp_total_batch", "int", None, {"low": 1, "empty": "about the profile's, as the number of hosts divides it"},
         "Tokens in one step over all ranks."),
        ("ddp_iterations", "int", None, {"low": 1, "empty": _PROFILE},
         "Steps of the whole run."),
        ("ddp_batch_split", "str", "auto", {"choices": ("auto", "equal", "threads", "speed")},
         "How a step's rows are shared out: equally, by threads, by speed (ddp_speed or as measured), or auto: by speed where known."),
        ("ddp_rebalance", "bool", True, {},
         "Whether shares follow the hosts' speeds while training (ddp_batch_split auto and speed; not with ddp_local_steps)."),
        ("ddp_eval_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two measurements on the validation shard; -1 for none."),
        ("ddp_eval_tokens", "int", None, {"low": 1, "empty": _PROFILE},
         "Tokens of one such measurement."),
        ("ddp_sample_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two samples of generated text; -1 for none."),
        ("ddp_save_every", "int", None, {"low": -1, "empty": _PROFILE},
         "Steps between two checkpoints; -1 for one at the end only."),
        ("ddp_save_minutes", "int", 30, {"low": 0},
         "A checkpoint also after so many minutes without one; 0 for none but those of ddp_save_every. Not with ddp_local_steps."),
        ("ddp_keep_checkpoints", "int", 2, {"low": -1},
         "Checkpoints that stay on each host; -1 keeps all of them."),
        ("ddp_sync", "str", "auto", {"choices": ("auto", "exact", "bf16", "int8", "int4", "dense", "ddp")},
         "What gradients travel as: float32 (exact), rounded, or whole tensors (dense, ddp); auto: as measured."),
        ("ddp_local_steps", "int", 0, {"low": 0, "word": "auto"},
         "For slow links: steps that each rank makes apart before all take the mean of their changes; 0 for none; auto: as measured."),
        ("ddp_head", "str", "auto", {"choices": ("auto", "whole", "shared")},
         "The head: whole (its gradient travels), shared (each host has a part of the vocabulary), or auto: what sends less."),
        ("ddp_matmul", "str", "auto", {"choices": ("auto", "fp32", "bf16")},
         "Precision of the matrix products; auto: bf16 where all CPUs have it and are faster with it, as measured; else fp32."),
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
         "Let the peers, and only them, through an active firewall."),
    ),
    *_rows(
        "The trainer", RUN,
        ("ddp_trainer_source", "str", "ours", {},
         "What trains: this collection's trainer, the path of a nanochat checkout here, or a git URL."),
        ("ddp_trainer_join", "bool", True, {},
         "On CPUs: a checkout's ranks train one model together, which they do not by themselves; nothing of it is changed."),
        ("ddp_trainer_offline", "bool", False, {},
         "The hosts have no way to a package index: packages are fetched once and handed on."),
        ("ddp_torch", "str", "2.13.0", {"pattern": r"\d+\.\d+(\.\d+)?[A-Za-z0-9.+]*"},
         "Version of PyTorch on every host; ranks of different versions may disagree."),
        ("ddp_torch_index", "str", "auto", {"pattern": r"auto|default|https?://\S+|file://\S+"},
         "Where torch comes from: PyTorch's own CPU index when it answers (auto), the default index (default), or a URL."),
        ("ddp_python_mirror", "str", None, {"pattern": r"(https?|file)://\S+", "empty": "GitHub"},
         "From where uv takes a Python for a host that has none of 3.10 or newer."),
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
        "Fine-tuning (ddp_stage sft)", RUN,
        ("ddp_sft_data", "str", None, {"empty": "a few exchanges that come with the trainer"},
         "File of conversations on the controller: a JSON list of role and content in each line."),
        ("ddp_sft_val_data", "str", None, {"empty": "no evaluation"},
         "The same of conversations that are not learnt from: ddp_eval_every and the end say the bits per byte of their answers."),
        ("ddp_sft_iterations", "int", None, {"low": 1, "empty": _PROFILE},
         "Steps of the fine-tuning."),
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

PROFILES: dict[str, Settings] = {
    "smoke": {
        "ddp_depth": 4,
        "ddp_aspect_ratio": 64,
        "ddp_head_dim": 64,
        "ddp_sequence": 512,
        "ddp_vocab_size": 4096,
        "ddp_device_batch": 2,
        "ddp_total_batch": 2048,
        "ddp_iterations": 10,
        "ddp_restarts": 0,
        "ddp_eval_every": 250,
        "ddp_eval_tokens": 16384,
        "ddp_sample_every": -1,
        "ddp_save_every": 5,
        "ddp_data_source": "text",
        "ddp_data_shards": 3,
        "ddp_sft_iterations": 200,
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
        "ddp_restarts": 3,
        "ddp_eval_every": 250,
        "ddp_eval_tokens": 65536,
        "ddp_sample_every": 1000,
        "ddp_save_every": 250,
        "ddp_data_source": "url",
        "ddp_data_shards": 8,
        "ddp_sft_iterations": 300,
    },
}
