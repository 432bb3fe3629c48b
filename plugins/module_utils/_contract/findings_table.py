# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every finding of plan, preflight and doctor: one code, one meaning, one remedy (docs/troubleshooting.md)."""

from __future__ import annotations

import functools
from typing import Dict, NamedTuple

ERROR, WARNING, INFO = "error", "warning", "info"


class FindingKind(NamedTuple):
    """The meaning of one code."""

    severity: str
    title: str
    why: str
    remedy: str


_error = functools.partial(FindingKind, ERROR)
_warning = functools.partial(FindingKind, WARNING)
_info = functools.partial(FindingKind, INFO)

# fmt: off
CATALOGUE: Dict[str, FindingKind] = {
    # Of the plan, from settings and probes
    "setting-refused": _error(
        "A setting cannot be used as it is", "The plan rejects wrong settings before it changes any host.",
        "Correct it in the inventory or on the command line; docs/settings.md lists all settings.",
    ),
    "checkpoints-lost": _error(
        "Training would not resume from the existing checkpoints", "Starting now would set them aside and begin at step 0.",
        "Undo the change, give the new training a name (ddp_run), or start over with -e ddp_fresh=true (old outputs are kept).",
    ),
    "trainings-differ": _error(
        "Hosts hold different trainings of the run",
        "Their weights cannot be combined. A host that was away when the run was started over holds an older training, possibly with a "
        "higher step.", "Set one of them aside, or start over with -e ddp_fresh=true.",
    ),
    "address-refused": _error(
        "A host has no address at which the others reach it",
        "Every rank connects to every other rank at the address in the plan, by IPv4 or all by IPv6; Gloo looks for its interface by name.",
        "Set ddp_nic or ddp_address of that host to an interface on the shared network that is up.",
    ),
    "venv-refused": _error(
        "The trainer's environment cannot be created in the chosen folder", "PyTorch and the trainer's packages go there.",
        "Set ddp_venv_dir to another folder.",
    ),
    "source-missing": _error(
        "Data named in the settings does not exist or cannot be used", "The start would fail later, after other hosts were changed.",
        "Correct the setting, or put there what is missing.",
    ),
    "base-refused": _error(
        "There is no base model to start from, or it does not match the settings",
        "Fine-tuning needs the checkpoint of a run that trained a base model of the same shape, vocabulary and data.",
        "Train one first (ddp_stage=base), use the settings that it was trained with, or name the run that has one (ddp_run).",
    ),
    "results-read-only": _error(
        "The controller cannot write the results", "Logs, metrics and reports are collected on it.",
        "Set ddp_results_dir to a folder that the user who runs the playbook can write to.",
    ),
    "nic-faster-up": _warning(
        "A faster network interface is up", "Each step sends gradients, and waits longer on the slower interface.",
        "Give the faster interface an address on the peers' network, or set ddp_nic of that host to it.",
    ),
    "nic-wifi": _warning(
        "A host is on Wi-Fi", "Each step waits for the slowest link, and Wi-Fi is slow with varying latency.",
        "Use a cable. If there is none: ddp_sync=int4 sends an eighth as much, and a larger ddp_total_batch sends less often.",
    ),
    "nic-overlay": _warning(
        "Training traffic goes over an overlay or virtual network",
        "Encryption and detours make each step wait longer; ddp_nic or ddp_address selects that network.",
        "If the hosts share a direct network, set ddp_nic to its interface.",
    ),
    "guest-blind": _info(
        "A guest cannot see everything that it could leave for", "ddp_polite=guest asks logind who sits at the machine.",
        "No action needed. Limit the time of day with ddp_hours, or say when to leave by a command, ddp_away_if.",
    ),
    "python-made": _info(
        "A Python is installed for the trainer",
        "The host has none that PyTorch supports. uv installs one below the base folder, once and without root; the system is not changed.",
        "No action needed. ddp_python selects another Python; python-install-mirror in ~/.config/uv/uv.toml there names another source "
        "than GitHub.",
    ),
    "no-compiler": _info(
        "A host has no C compiler that works",
        "With one, the trainer computes what lies between matrix products with C kernels, which are faster than PyTorch's operations; the "
        "results are the same.", "No action needed. Install gcc there, or let a Python package compile (ddp_kernels=zig).",
    ),
    "threads-over-cores": _warning(
        "More threads than cores",
        "Threads that wait for a processor slow every step down, and two threads on one core hardly speed up matrix products.",
        "Leave ddp_threads of that host empty, or train with fewer nodes on it.",
    ),
    "one-machine-twice": _warning(
        "Two hosts of the inventory are one machine", "Its ranks share cores and memory, so training is no faster than with one of them.",
        "Correct ansible_host of the one that should be another machine, or keep only one of them.",
    ),
    "other-training": _warning(
        "Another training process runs on the host", "It uses cores and memory; a leftover of an earlier attempt may also hold a port.",
        "Look at it with ps, and stop it if nobody needs it; this collection stops only what it started itself.",
    ),
    # Of preflight, which tries the plan on the hosts
    "host-down": _error(
        "A host does not answer over SSH", "The others would wait for it at the rendezvous until the timeout.",
        "Check that it is on and awake, and that you can log in to it with ssh as Ansible does.",
    ),
    "evidence-missing": _error(
        "A check could not be made on a host", "A missing check is not a passed check; the run might fail for a reason nobody tested.",
        "Check that the host is still reachable, and try again.",
    ),
    "port-blocked": _error(
        "A firewall blocks a port of the job",
        "Ranks connect to each other on the rendezvous port and on any port of the data range, in both directions. Dropped packets cause "
        "no error, so training would hang at its first collective.",
        "Open the ports to this job's hosts only: ansible-playbook train.yml -i INVENTORY --tags network",
    ),
    "no-sudo": _error(
        "The owner of a host must open its firewall", "A port of the job is closed, and this user cannot become root without a password.",
        "Ask the owner of the host to run the commands.",
    ),
    "peer-unreachable": _error(
        "No route between two hosts", "Every rank must reach every other rank.",
        "Check the cable or Wi-Fi link, that both addresses are in the same network, and the firewall or client isolation of the router "
        "between them.",
    ),
    "port-held": _error(
        "The rendezvous port is taken", "Often an earlier attempt still holds it; ranks would fail with EADDRINUSE, or join the wrong run.",
        "Stop that process if nobody needs it, or set ddp_port to a free port.",
    ),
    "stale-ranks": _warning(
        "Processes of an earlier run of this collection are still running", "They use cores and memory, and may hold the rendezvous port.",
        "Stop them: ansible-playbook nanochat.ddp.stop -i INVENTORY; launching the same run does that, too.",
    ),
    "name-is-loopback": _info(
        "The name of a host resolves to its loopback address",
        "A peer given this name would connect to itself. The plan uses addresses, so this does no harm.",
        "No action needed for this job. By hand, use addresses, or remove the 127.0.1.1 line from /etc/hosts.",
    ),
    "route-differs": _warning(
        "Packets to a peer leave through a different interface than planned",
        "They may take a slower link, or arrive from an address that the peer's firewall does not expect.",
        "Set ddp_nic and ddp_address to the interface that leads to the peers, or repair the route.",
    ),
    "route-over-overlay": _warning(
        "Packets to a peer go through an overlay network",
        "Tailscale, WireGuard and the like encrypt every packet and may detour it; each step waits for that.",
        "Use addresses on the shared network (ddp_address), or remove the peers' network from the overlay's routes.",
    ),
    "route-over-bridge": _warning(
        "Packets to a peer go to a bridge for containers or virtual machines", "Such a network usually does not leave the host.",
        "Set ddp_nic and ddp_address to the interface that leads to the peers.",
    ),
    "link-unmeasured": _warning(
        "A connection opened, but could not be measured",
        "The link may drop out, be very slow, or lose large packets, so that the first gradient never arrives.",
        "Try again; if it persists, check for packet loss with ping and for errors with ip -s link. Where only small packets arrive, "
        "lower the MTU on both hosts: sudo ip link set NIC mtu 1400",
    ),
    "link-slow": _warning(
        "A link is slow for exchanging gradients",
        "Every step sends each rank's gradients over it, in several round trips that each cost its delay.",
        "Use a cable and a gigabit switch, or disable Wi-Fi power saving (iw dev NIC set power_save off); ddp_sync=int4 sends an eighth "
        "as much, a larger ddp_total_batch sends less often. Or train on one host.",
    ),
    "torch-differs": _error(
        "The ranks have different versions of PyTorch", "Their wire formats and rounding may differ.",
        "Install the planned version everywhere: ansible-playbook train.yml -i INVENTORY --tags trainer",
    ),
    "trainer-differs": _error(
        "The trainer's files differ between hosts", "Ranks that run different code may hang or train different models.",
        "Copy the same files everywhere: ansible-playbook train.yml -i INVENTORY --tags trainer",
    ),
    "cpu-features-differ": _info(
        "The CPUs have different instructions for matrix products", "The ranks run at different speeds; their weights stay identical.",
        "No action needed. The faster host gets more rows, unless ddp_batch_split is equal or threads.",
    ),
    "host-busy": _warning(
        "Something else uses the CPU of a host", "Every step waits for the slowest rank.",
        "Look at it with top; stop it, or start when it has finished.",
    ),
    "memory-short": _error(
        "A host has less memory than its rank needs, or less of it free", "It would swap, or its kernel kill the rank.",
        "Stop whatever uses the memory, or lower ddp_depth, ddp_device_batch or ddp_sequence.",
    ),
    "disk-short": _error(
        "A host has too little disk space for checkpoints, data and software", "A checkpoint that cannot be written ends the run.",
        "Set ddp_base_dir to a larger disk, or lower ddp_keep_checkpoints.",
    ),
    "folder-refused": _error(
        "A folder on a host cannot be used",
        "A job keeps all its files in the base folder and runs programs from there, again and again: this user must be able to write and "
        "run them there, and nobody else to change them.",
        "Set ddp_base_dir to a folder of this host's own that only this user can write to.",
    ),
    "no-tmux": _error(
        "A host has no tmux", "Training runs in a tmux session, so that it survives a lost connection.",
        "Ask its owner to install it: sudo apt-get install tmux (or dnf, pacman, apk).",
    ),
    "python-too-old": _error(
        "A host has no Python that PyTorch supports", "PyTorch needs 3.10 or newer.",
        "Install one (apt install python3.12; without root: uv python install 3.12), which the plan then finds, or set ddp_python to the "
        "path of another.",
    ),
    "architecture-differs": _error(
        "The hosts have different architectures, or one that PyTorch does not support",
        "Architectures round differently, so the ranks' weights would drift apart.",
        "Use hosts of the same architecture, x86_64 or aarch64.",
    ),
    "ends-at-logout": _warning(
        "systemd kills this user's processes at logout", "The run would end when the SSH connection that started it closes.",
        "Enable lingering for the user: sudo loginctl enable-linger USER.",
    ),
    "ulimit-low": _warning(
        "A resource limit of this user is too low for training",
        "Each rank connects to every other rank, starts a thread per core, and writes large checkpoints.",
        "Raise it in /etc/security/limits.conf and log in again.",
    ),
    "gloo-failed": _error(
        "A real all-reduce among the hosts failed", "Every training step does the same.",
        "See the findings about ports, routes and firewalls; they usually name the reason. If there are none, a host was frozen or cut "
        "off for a moment: run the playbook again.",
    ),
    "run-in-progress": _info(
        "The run is in progress, so checks that would disturb it were skipped", "Its ports, links and cores are in use.",
        "To see its progress: ansible-playbook nanochat.ddp.status -i INVENTORY",
    ),
    "not-worth-it": _warning(
        "All hosts together are hardly faster than one of them",
        "In each step the ranks wait for the gradients of the others and for the slowest rank.",
        "Train on one host: ansible-playbook train.yml -i INVENTORY -e target=HOST",
    ),
    # Of the doctor, about a run that is stuck or has ended
    "rank-host-no-answer": _error(
        "A host of the run does not answer", "The other ranks wait for it at the next collective until the timeout.",
        "Check that the machine is on and awake and its network is up, then: ansible-playbook train.yml -i INVENTORY --tags restart",
    ),
    "rank-away": _warning(
        "The run continues without a host",
        "With ddp_restarts and ddp_min_hosts the others continue when a host is lost or taken out, at a lower speed.",
        "If its keeper runs, it rejoins automatically; otherwise: ansible-playbook nanochat.ddp.join -i INVENTORY -e target=HOST",
    ),
    "rank-waits": _warning(
        "No rank trains, and keepers wait for hosts", "They start once ddp_min_hosts hosts can reach each other.",
        "Wait a minute. If nothing changes, check the hosts named; ansible-playbook nanochat.ddp.preflight -i INVENTORY tests the links.",
    ),
    "keeper-gone": _error(
        "The keeper of a host has ended and will not return",
        "Nothing starts a rank there. The others continue without it, or wait if ddp_min_hosts requires it.",
        "Start it: ansible-playbook nanochat.ddp.join -i INVENTORY -e target=HOST",
    ),
    "run-given-up": _error(
        "The run failed too often and was given up", "It failed three times at one step, or more than ddp_restarts times within an hour.",
        "Remove the cause of the last failure, or raise ddp_restarts; then: ansible-playbook train.yml -i INVENTORY --tags restart",
    ),
    "rank-not-examined": _error(
        "The evidence of a rank could not be gathered", "Nothing certain can be said about the run without it.",
        "Remove the cause named, then: ansible-playbook nanochat.ddp.doctor -i INVENTORY",
    ),
    "rank-oom": _error(
        "A rank was killed by the kernel: out of memory (OOM)",
        "The kernel kills the process that uses most memory; the other ranks then wait for it.",
        "Lower ddp_device_batch, or stop whatever else uses the memory; then restart: the run resumes from its newest checkpoint.",
    ),
    "rank-killed": _error(
        "A rank was killed by a signal", "Something on that host sent SIGKILL; the kernel reports no lack of memory.",
        "Find out what did, then restart: the run resumes from its newest checkpoint.",
    ),
    "rank-vanished": _error(
        "A rank disappeared without an exit status", "The machine restarted, or the whole session was killed.",
        "Restart: the run resumes from the newest checkpoint that any rank has.",
    ),
    "rank-failed": _error(
        "A rank ended with an error of its own", "The other ranks wait for it, or end because it is gone.",
        "Read the error, remove its cause, then restart: the run resumes from its newest checkpoint.",
    ),
    "loss-not-finite": _error(
        "The loss is infinite or not a number", "The weights are useless after that step, so training ends.",
        "Lower the learning rates (ddp_extra_args), then restart: the run resumes from its newest checkpoint.",
    ),
    "rank-not-started": _error(
        "A rank was never started, or has ended, while others wait", "A run works only if all of its ranks run.",
        "Restart the whole run: ansible-playbook train.yml -i INVENTORY --tags restart",
    ),
    "rank-frozen": _error(
        "The process of a rank is suspended",
        "It received SIGSTOP, or a terminal or debugger holds it; it uses no CPU and the others wait.",
        "Continue it with kill -CONT and the number given; the run then continues where it stopped.",
    ),
    "rank-in-kernel": _error(
        "A rank hangs in the kernel", "Usually a disk or a network file system does not respond.",
        "Look at dmesg on that host. When the disk responds again the run continues; otherwise restart it.",
    ),
    "rank-slow": _warning(
        "A rank is slow, not stuck", "Every step waits for the slowest rank.",
        "Reduce the load on that host. Its rows follow its speed, unless ddp_batch_split is equal or threads.",
    ),
    "rank-stuck": _error(
        "A rank did not arrive at a collective", "The others wait for it there; its stack shows where it is.",
        "Restart the run, and keep the evidence: it shows the line that the rank was at.",
    ),
    "link-cut": _error(
        "Packets between two hosts are lost",
        "A cable, a Wi-Fi link or a firewall between them drops packets; each side waits for the other.",
        "Check the link and the firewalls: ansible-playbook nanochat.ddp.preflight -i INVENTORY; then restart.",
    ),
    "data-mismatch": _error(
        "A rank has no data, or different data from the others", "One rank ends or waits for data while the others wait for it.",
        "Copy the same shards to all hosts: ansible-playbook train.yml -i INVENTORY --tags data; then restart.",
    ),
    "disk-full": _error(
        "A host has no disk space left", "Checkpoints and logs cannot be written; the last complete checkpoint is kept.",
        "Free space on that host, or lower ddp_keep_checkpoints; then restart.",
    ),
    "settings-differ": _error(
        "The ranks were started with different settings", "They would train different models, or hang at the first collective.",
        "Start all ranks from one plan: ansible-playbook train.yml -i INVENTORY --tags restart",
    ),
    "weights-differ": _error(
        "The ranks' weights are not identical",
        "They no longer train one model. Different libraries, bad memory or a bug in nanochat.ddp can cause that.",
        "Restart from the last checkpoint. If it happens again, test the memory of the hosts and compare their torch versions.",
    ),
    "not-running": _info(
        "No rank runs", "The run has ended or was never started.", "To start it: ansible-playbook train.yml -i INVENTORY",
    ),
    "healthy": _info(
        "All ranks are healthy and make progress", "Nothing is wrong.", "No action needed.",
    ),
    "healthy-slow": _warning(
        "All ranks make progress, but slower than they could", "Every step waits for the slowest rank.",
        "Reduce the load on the host named.",
    ),
}
