# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of preflight, which tries the plan on the hosts."""

from __future__ import annotations

from typing import Dict

from .kind import ERROR, INFO, WARNING, Kind

KINDS: Dict[str, Kind] = {
    "host-down": Kind(
        ERROR,
        "A host does not answer over SSH",
        "The others would wait for it at the rendezvous until the timeout.",
        "Check that it is on and awake, and that you can log in to it with ssh as Ansible does.",
        (12, 19),
        ("UNREACHABLE", "Connection timed out", "Permission denied (publickey)"),
    ),
    "evidence-missing": Kind(
        ERROR,
        "A check could not be made on a host",
        "A missing check is not a passed check; the run might fail for a reason nobody tested.",
        "Check that the host is still reachable, and try again.",
    ),
    "port-blocked": Kind(
        ERROR,
        "A firewall blocks a port of the job",
        "Ranks connect to each other on the rendezvous port and on any port of the data range, in both directions. Dropped "
        "packets cause no error, so training would hang at its first collective.",
        "Open the ports to this job's hosts only: ansible-playbook train.yml -i INVENTORY --tags network",
        (1, 2, 19, 20),
        (
            "Gloo connectFullMesh failed",
            "Connect timeout",
            "SO_ERROR: Connection refused",
            "SO_ERROR: No route to host",
            "DistStoreError: Timed out",
            "1/2 clients joined",
            "DistNetworkError",
        ),
    ),
    "no-sudo": Kind(
        ERROR,
        "The owner of a host must open its firewall",
        "A port of the job is closed, and this user cannot become root without a password.",
        "Ask the owner of the host to run the commands.",
        (2,),
        ("sudo: a password is required", "Missing sudo password"),
    ),
    "peer-unreachable": Kind(
        ERROR,
        "No route between two hosts",
        "Every rank must reach every other rank.",
        "Check the cable or Wi-Fi link, that both addresses are in the same network, and the firewall or client isolation of the "
        "router between them.",
        (1, 3, 5, 19),
        ("No route to host", "Network is unreachable", "Connect timeout"),
    ),
    "port-held": Kind(
        ERROR,
        "The rendezvous port is taken",
        "Often an earlier attempt still holds it; ranks would fail with EADDRINUSE, or join the wrong run.",
        "Stop that process if nobody needs it, or set ddp_port to a free port.",
        (6,),
        ("EADDRINUSE", "Address already in use", "The server socket has failed to listen"),
    ),
    "stale-ranks": Kind(
        WARNING,
        "Processes of an earlier run of this collection are still running",
        "They use cores and memory, and may hold the rendezvous port.",
        "Stop them: ansible-playbook nanochat.ddp.stop -i INVENTORY; launching the same run does that, too.",
        (6, 23),
        ("EADDRINUSE", "Address already in use"),
    ),
    "name-is-loopback": Kind(
        INFO,
        "The name of a host resolves to its loopback address",
        "A peer given this name would connect to itself. The plan uses addresses, so this does no harm.",
        "No action needed for this job. By hand, use addresses, or remove the 127.0.1.1 line from /etc/hosts.",
        (4,),
        ("remote=[127.0.0.1]", "remote=[127.0.1.1]", "Connection refused, remote=[::1]"),
    ),
    "route-differs": Kind(
        WARNING,
        "Packets to a peer leave through a different interface than planned",
        "They may take a slower link, or arrive from an address that the peer's firewall does not expect.",
        "Set ddp_nic and ddp_address to the interface that leads to the peers, or repair the route.",
        (3,),
    ),
    "route-over-overlay": Kind(
        WARNING,
        "Packets to a peer go through an overlay network",
        "Tailscale, WireGuard and the like encrypt every packet and may detour it; each step waits for that.",
        "Use addresses on the shared network (ddp_address), or remove the peers' network from the overlay's routes.",
        (5,),
        ("tailscale0", "wg0"),
    ),
    "route-over-bridge": Kind(
        WARNING,
        "Packets to a peer go to a bridge for containers or virtual machines",
        "Such a network usually does not leave the host.",
        "Set ddp_nic and ddp_address to the interface that leads to the peers.",
        (3, 5),
        ("docker0", "virbr0"),
    ),
    "link-unmeasured": Kind(
        WARNING,
        "A connection opened, but could not be measured",
        "The link may drop out, be very slow, or lose large packets, so that the first gradient never arrives.",
        "Try again; if it persists, check for packet loss with ping and for errors with ip -s link. Where only small packets arrive, "
        "lower the MTU on both hosts: sudo ip link set NIC mtu 1400",
        (1, 5, 19),
    ),
    "link-slow": Kind(
        WARNING,
        "A link is slow for exchanging gradients",
        "Every step sends each rank's gradients over it, in several round trips that each cost its delay.",
        "Use a cable and a gigabit switch, or disable Wi-Fi power saving (iw dev NIC set power_save off); ddp_sync=int4 sends an eighth as "
        "much, a larger ddp_total_batch sends less often. Or train on one host.",
        (3, 16, 25),
    ),
    "torch-differs": Kind(
        ERROR,
        "The ranks have different versions of PyTorch",
        "Their wire formats and rounding may differ.",
        "Install the planned version everywhere: ansible-playbook train.yml -i INVENTORY --tags trainer",
        (9,),
    ),
    "trainer-differs": Kind(
        ERROR,
        "The trainer's files differ between hosts",
        "Ranks that run different code may hang or train different models.",
        "Copy the same files everywhere: ansible-playbook train.yml -i INVENTORY --tags trainer",
        (9, 24),
    ),
    "data-differs": Kind(
        ERROR,
        "The shards or the tokenizer differ between hosts",
        "One rank would reach the end while others wait for it, or the ranks would train on different tokens.",
        "Copy the same shards to all hosts: ansible-playbook train.yml -i INVENTORY --tags data",
        (7, 8),
        ("no parquet files", "StopIteration"),
    ),
    "cpu-features-differ": Kind(
        INFO,
        "The CPUs have different instructions for matrix products",
        "The ranks run at different speeds; their weights stay identical.",
        "No action needed. ddp_batch_split=speed gives the faster host more rows.",
        (10, 17),
    ),
    "host-busy": Kind(
        WARNING,
        "Something else uses the CPU of a host",
        "Every step waits for the slowest rank.",
        "Look at it with top; stop it, or start when it has finished.",
        (17,),
    ),
    "memory-short": Kind(
        ERROR,
        "A host has less memory than its rank needs",
        "The kernel would kill the rank when memory runs out.",
        "Lower ddp_depth, ddp_device_batch or ddp_sequence.",
        (15,),
        ("Out of memory", "can't allocate memory"),
    ),
    "disk-short": Kind(
        ERROR,
        "A host has too little disk space for checkpoints, data and software",
        "A checkpoint that cannot be written ends the run.",
        "Set ddp_base_dir to a larger disk, or lower ddp_keep_checkpoints.",
        (18,),
        ("No space left on device",),
    ),
    "folder-refused": Kind(
        ERROR,
        "A folder on a host cannot be used",
        "A job keeps all its files in the base folder and runs programs from there, again and again: this user must be able to write and "
        "run them there, and nobody else to change them.",
        "Set ddp_base_dir to a folder of this host's own that only this user can write to.",
        (24,),
        (
            "Permission denied",
            "Read-only file system",
            "failed to map segment from shared object",
            "Operation not permitted",
            "dd: unrecognized operand",
        ),
    ),
    "no-tmux": Kind(
        ERROR,
        "A host has no tmux",
        "Training runs in a tmux session, so that it survives a lost connection.",
        "Ask its owner to install it: sudo apt-get install tmux (or dnf, pacman, apk).",
        (12,),
        ("tmux: command not found",),
    ),
    "python-too-old": Kind(
        ERROR,
        "A host has no Python that PyTorch supports",
        "PyTorch needs 3.10 or newer.",
        "Install one (apt install python3.12; without root: uv python install 3.12), which the plan then finds, or set ddp_python to the "
        "path of another.",
        (),
        ("No matching distribution found for torch", "requires a different Python"),
    ),
    "architecture-differs": Kind(
        ERROR,
        "The hosts have different architectures, or one that PyTorch does not support",
        "Architectures round differently, so the ranks' weights would drift apart.",
        "Use hosts of the same architecture, x86_64 or aarch64.",
        (21,),
    ),
    "ends-at-logout": Kind(
        WARNING,
        "systemd kills this user's processes at logout",
        "The run would end when the SSH connection that started it closes.",
        "Enable lingering for the user: sudo loginctl enable-linger USER.",
        (12,),
    ),
    "ulimit-low": Kind(
        WARNING,
        "A resource limit of this user is too low for training",
        "Each rank connects to every other rank, starts a thread per core, and writes large checkpoints.",
        "Raise it in /etc/security/limits.conf and log in again.",
        (),
        (
            "Too many open files",
            "Resource temporarily unavailable",
            "can't start new thread",
            "File too large",
            "SIGXCPU",
            "SIGXFSZ",
        ),
    ),
    "gloo-failed": Kind(
        ERROR,
        "A real all-reduce among the hosts failed",
        "Every training step does the same.",
        "See the findings about ports, routes and firewalls; they usually name the reason. If there are none, a host was frozen "
        "or cut off for a moment: run the playbook again.",
        (1, 3, 19, 21),
        ("Gloo connectFullMesh failed", "DistNetworkError", "Connection closed by peer"),
    ),
    "run-in-progress": Kind(
        INFO,
        "The run is in progress, so checks that would disturb it were skipped",
        "Its ports, links and cores are in use.",
        "To see its progress: ansible-playbook nanochat.ddp.status -i INVENTORY",
    ),
    "not-worth-it": Kind(
        WARNING,
        "All hosts together are hardly faster than one of them",
        "In each step the ranks wait for the gradients of the others and for the slowest rank.",
        "Train on one host: ansible-playbook train.yml -i INVENTORY -e target=HOST",
        (16, 25),
    ),
}
