# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the plan finds in settings and probes."""

from __future__ import annotations

from typing import Dict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import ERROR, INFO, WARNING, Kind

KINDS: Dict[str, Kind] = {
    "setting-refused": Kind(
        ERROR,
        "A setting cannot be used as it is",
        "Wrong settings are refused before any host is changed.",
        "Correct it in the inventory or on the command line; docs/settings.md lists all settings.",
    ),
    "checkpoints-lost": Kind(
        ERROR,
        "Training would not go on from the checkpoints that are there",
        "A start would set them aside and begin at step 0.",
        "Set the setting back, give the new training a name of its own (ddp_run), or set aside what is there with -e ddp_fresh=true.",
    ),
    "trainings-differ": Kind(
        ERROR,
        "Hosts hold different trainings of the run, of which none is the newer one",
        "Weights of two trainings cannot be put together, and a start sets one of them aside.",
        "Say which goes on, by its id: -e ddp_training=ID; what the other hosts have is kept in previous/N of the run's folder. Or begin "
        "again with -e ddp_fresh=true.",
    ),
    "training-older": Kind(
        WARNING,
        "A host holds an older training of the run",
        "It was away when the run was begun again. The newer training goes on, also where the older one has come to a higher step; "
        "what the host has is set aside at the start, in previous/N of the run's folder.",
        "Nothing to do; to go on with the older one instead: -e ddp_training=ID.",
    ),
    "address-refused": Kind(
        ERROR,
        "A host cannot be reached by the others at the address that is set",
        "Every rank connects to every other one by the address of the plan.",
        "Set ddp_nic or ddp_address of that host to an interface in the common network.",
        (3, 4),
    ),
    "venv-refused": Kind(
        ERROR,
        "The trainer's environment cannot be made where it is wanted",
        "PyTorch and the trainer's packages are installed there.",
        "Set ddp_venv_dir to another folder.",
        (9, 24),
    ),
    "source-missing": Kind(
        ERROR,
        "Data or a trainer that the settings name are not there",
        "A start would fail later, when other hosts have been changed already.",
        "Correct the path or the URL.",
        (7, 8),
    ),
    "base-missing": Kind(
        ERROR,
        "There is no base model to go on from",
        "Fine-tuning and evaluation (ddp_stage) begin with the checkpoint of a run that trained a model.",
        "Train it first, with ddp_stage=base, or name the run that has one (ddp_run).",
    ),
    "base-differs": Kind(
        ERROR,
        "The base model is not the one that the settings describe",
        "Another shape or vocabulary cannot be loaded, and another tokenizer gives the tokens other meanings.",
        "Give the settings that the base model was made with, or name another run (ddp_run).",
    ),
    "conversations-broken": Kind(
        ERROR,
        "The conversations to learn from cannot be used",
        "Each line of ddp_sft_data is a JSON list of role and content, in which user and assistant take turns.",
        "Correct the lines that are named; nothing was started.",
    ),
    "source-differs": Kind(
        ERROR,
        "The nanochat checkout has other flags or functions than those by which it is driven",
        "A fork may have changed them, and older commits had others; a start would fail on every host.",
        "Take a commit of nanochat that has them, or this collection's trainer (ddp_trainer_source=ours).",
        (21,),
    ),
    "results-read-only": Kind(
        ERROR,
        "Results cannot be written on the controller",
        "Logs, metrics and reports are collected there.",
        "Set ddp_results_dir to a folder of the user who runs the playbook.",
    ),
    "nic-faster-up": Kind(
        WARNING,
        "A faster network interface is up",
        "Each step sends gradients; over the slower interface each step waits longer.",
        "Give the faster interface an address in the peers' network, or name it as ddp_nic of that host.",
        (3,),
    ),
    "nic-wifi": Kind(
        WARNING,
        "A host is on Wi-Fi",
        "Each step waits for the slowest link, and Wi-Fi is slow and its latency varies.",
        "Connect the host by cable, or set ddp_sync=bf16 to halve what is sent, and ddp_local_steps=auto to send seldom.",
        (3, 25),
    ),
    "nic-overlay": Kind(
        WARNING,
        "Training traffic goes over an overlay or virtual network",
        "Encryption and detours make each step wait longer; it was chosen by ddp_nic or ddp_address.",
        "Set ddp_nic to the interface of the common network where there is one.",
        (3, 5),
    ),
    "nic-route-overlay": Kind(
        INFO,
        "The route to the peers is an overlay; training goes around it",
        "The address by which a host is logged in to belongs to an overlay such as Tailscale; a direct network is faster.",
        "Nothing to do; ddp_nic and ddp_address overrule the choice.",
        (3, 5),
    ),
    "trainer-apart": Kind(
        WARNING,
        "The trainer does not exchange gradients on CPUs",
        "nanochat's own joins a process group with CUDA only: on CPUs its ranks train a model each, or end with an error.",
        "Let the launcher join them (ddp_trainer_join=true), take this collection's trainer, train on one host, or on GPUs.",
        (21,),
        ("Default process group has not been initialized",),
    ),
    "local-steps-chosen": Kind(
        INFO,
        "How ddp_local_steps auto was decided",
        "By the speeds of the hosts and the link that the rehearsal measured. A run keeps what it began with.",
        "Nothing; set ddp_local_steps to a number to decide it yourself, 0 for steps that are all made together.",
        (25,),
    ),
    "trainer-commit": Kind(
        INFO,
        "The commit of the repository that trains",
        "A git URL is cloned to the controller once; later runs train with what was cloned.",
        "Nothing to do; -e trainer_update=true fetches it again, and URL#COMMIT takes another one.",
        (21,),
    ),
    "trainer-behind": Kind(
        WARNING,
        "The repository of the trainer has a newer commit than the one that trains",
        "A git URL is cloned to the controller once, so that a run which goes on does so with the same code.",
        "Add -e trainer_update=true once to take the newer one, or name the one that is used (URL#COMMIT).",
        (21,),
    ),
    "speed-unknown": Kind(
        INFO,
        "Rows are shared out by threads, since no speed is known",
        "ddp_batch_split is speed, which wants a measured step of each host.",
        "Run preflight, which measures it, or set ddp_speed for every host.",
        (17,),
    ),
    "batch-adapted": Kind(
        INFO,
        "The batch was fitted to the hosts",
        "Every host takes whole passes of whole rows, so what nobody set of the batch follows the number and speed of the hosts.",
        "Nothing to do; ddp_total_batch and ddp_device_batch say it otherwise.",
    ),
    "python-made": Kind(
        INFO,
        "A Python is made for the trainer",
        "The host has none that PyTorch runs on. uv makes one below the base folder, once and without root; nothing else there is changed.",
        "Nothing to do; ddp_python names another one, and ddp_python_mirror another place to take it from than GitHub.",
    ),
    "threads-over-cores": Kind(
        WARNING,
        "More threads than cores",
        "Threads that wait for a processor make every step slower than fewer threads would, and two on one core hardly help "
        "each other with matrix products.",
        "Lower ddp_threads on that host, or leave it empty.",
    ),
    "memory-tight": Kind(
        WARNING,
        "Less memory is free than the run needs",
        "The machine would swap or end the process that uses most memory.",
        "End what uses the memory, or lower ddp_device_batch.",
    ),
    "other-training": Kind(
        WARNING,
        "Another training process runs on the host",
        "It takes cores and memory, and if it is left over from an earlier try, perhaps a port.",
        "Look at it with ps, and end it if nobody needs it; this collection only ends what it started itself.",
        (6,),
    ),
}
