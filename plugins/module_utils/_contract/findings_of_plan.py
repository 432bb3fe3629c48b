# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of the plan, from settings and probes."""

from __future__ import annotations

from typing import Dict

from .kind import ERROR, INFO, WARNING, Kind

KINDS: Dict[str, Kind] = {
    "setting-refused": Kind(
        ERROR,
        "A setting cannot be used as it is",
        "The plan rejects wrong settings before it changes any host.",
        "Correct it in the inventory or on the command line; docs/settings.md lists all settings.",
    ),
    "checkpoints-lost": Kind(
        ERROR,
        "Training would not resume from the existing checkpoints",
        "Starting now would set them aside and begin at step 0.",
        "Undo the change, give the new training a name (ddp_run), or start over with -e ddp_fresh=true (old outputs are kept).",
    ),
    "trainings-differ": Kind(
        ERROR,
        "Hosts hold different trainings of the run",
        "Their weights cannot be combined. A host that was away when the run was started over holds an older training, possibly with a "
        "higher step.",
        "Set one of them aside, or start over with -e ddp_fresh=true.",
    ),
    "address-refused": Kind(
        ERROR,
        "A host has no address at which the others reach it",
        "Every rank connects to every other rank at the address in the plan, by IPv4 or all by IPv6; Gloo looks for its interface by name.",
        "Set ddp_nic or ddp_address of that host to an interface on the shared network that is up.",
        (3, 4),
        (
            "Unable to find address for",
            "Cannot assign requested address",
            "Address family not supported",
            "Invalid argument",
        ),
    ),
    "venv-refused": Kind(
        ERROR,
        "The trainer's environment cannot be created in the chosen folder",
        "PyTorch and the trainer's packages go there.",
        "Set ddp_venv_dir to another folder.",
        (9, 24),
    ),
    "source-missing": Kind(
        ERROR,
        "Data or a trainer named in the settings does not exist",
        "The start would fail later, after other hosts were changed.",
        "Correct the path or the URL.",
        (7, 8),
    ),
    "base-missing": Kind(
        ERROR,
        "There is no base model to start from",
        "Fine-tuning and evaluation (ddp_stage) need the checkpoint of a run that trained a base model.",
        "Train one first (ddp_stage=base), or name a run that has one (ddp_run).",
    ),
    "base-differs": Kind(
        ERROR,
        "The base model does not match the settings",
        "Weights of another shape or vocabulary cannot be loaded, and another tokenizer changes what the tokens mean.",
        "Use the settings that the base model was trained with, or name another run (ddp_run).",
    ),
    "conversations-broken": Kind(
        ERROR,
        "The conversations for fine-tuning cannot be used",
        "Each line of ddp_sft_data must be a JSON list of role and content in which user and assistant alternate.",
        "Correct ddp_sft_data, or the lines listed; nothing was started.",
    ),
    "results-read-only": Kind(
        ERROR,
        "The controller cannot write the results",
        "Logs, metrics and reports are collected on it.",
        "Set ddp_results_dir to a folder that the user who runs the playbook can write to.",
    ),
    "nic-faster-up": Kind(
        WARNING,
        "A faster network interface is up",
        "Each step sends gradients, and waits longer on the slower interface.",
        "Give the faster interface an address on the peers' network, or set ddp_nic of that host to it.",
        (3,),
    ),
    "nic-wifi": Kind(
        WARNING,
        "A host is on Wi-Fi",
        "Each step waits for the slowest link, and Wi-Fi is slow with varying latency.",
        "Use a cable. If there is none: ddp_sync=int4 sends an eighth as much, and a larger ddp_total_batch sends less often.",
        (3, 25),
    ),
    "nic-overlay": Kind(
        WARNING,
        "Training traffic goes over an overlay or virtual network",
        "Encryption and detours make each step wait longer; ddp_nic or ddp_address selects that network.",
        "If the hosts share a direct network, set ddp_nic to its interface.",
        (3, 5),
    ),
    "guest-blind": Kind(
        INFO,
        "A guest cannot see everything that it could leave for",
        "ddp_polite=guest asks logind who sits at the machine.",
        "No action needed. Limit the time of day with ddp_hours, or say when to leave by a command, ddp_away_if.",
    ),
    "trainer-commit": Kind(
        INFO,
        "The commit of the trainer's repository",
        "The controller clones a git URL once, so that a resumed run uses the same code.",
        "No action needed. Add -e trainer_update=true once to use the newest commit, or select one (URL#COMMIT).",
        (21,),
    ),
    "python-made": Kind(
        INFO,
        "A Python is installed for the trainer",
        "The host has none that PyTorch supports. uv installs one below the base folder, once and without root; the system is not changed.",
        "No action needed. ddp_python selects another Python; python-install-mirror in ~/.config/uv/uv.toml there names another source "
        "than GitHub.",
    ),
    "no-compiler": Kind(
        INFO,
        "A host has no C compiler that works",
        "With one, the trainer computes what lies between matrix products with C kernels, which are faster than PyTorch's operations; the "
        "results are the same.",
        "No action needed. Install gcc there, or let a Python package compile (ddp_kernels=zig).",
    ),
    "threads-over-cores": Kind(
        WARNING,
        "More threads than cores",
        "Threads that wait for a processor slow every step down, and two threads on one core hardly speed up matrix products.",
        "Lower ddp_threads on that host, or leave it empty.",
    ),
    "one-machine-twice": Kind(
        WARNING,
        "Two hosts of the inventory are one machine",
        "Its ranks share cores and memory, so training is no faster than with one of them.",
        "Correct ansible_host of the one that should be another machine, or keep only one of them.",
    ),
    "memory-tight": Kind(
        WARNING,
        "Less memory is free than the run needs",
        "The machine would swap, or kill the process that uses most memory.",
        "Stop whatever uses the memory, or lower ddp_device_batch.",
    ),
    "other-training": Kind(
        WARNING,
        "Another training process runs on the host",
        "It uses cores and memory; a leftover of an earlier attempt may also hold a port.",
        "Look at it with ps, and stop it if nobody needs it; this collection stops only what it started itself.",
        (6,),
    ),
}
