# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings of the doctor about a run that is stuck or has ended."""

from __future__ import annotations

from typing import Dict

from .kind import ERROR, INFO, WARNING, Kind

KINDS: Dict[str, Kind] = {
    "rank-host-no-answer": Kind(
        ERROR,
        "A host of the run does not answer",
        "The other ranks wait for it at the next collective until the timeout.",
        "Check that the machine is on and awake and its network is up, then: ansible-playbook train.yml -i INVENTORY --tags restart",
        (12, 19),
        ("UNREACHABLE", "Connection timed out", "No route to host"),
    ),
    "rank-away": Kind(
        WARNING,
        "The run continues without a host",
        "With ddp_restarts and ddp_min_hosts the others continue when a host is lost or taken out, at a lower speed.",
        "If its keeper runs, it rejoins automatically; otherwise: ansible-playbook nanochat.ddp.join -i INVENTORY -e target=HOST",
        (35,),
    ),
    "rank-waits": Kind(
        WARNING,
        "No rank trains, and keepers wait for hosts",
        "They start once ddp_min_hosts hosts can reach each other.",
        "Wait a minute. If nothing changes, check the hosts named; ansible-playbook nanochat.ddp.preflight -i INVENTORY tests the links.",
        (35,),
    ),
    "keeper-gone": Kind(
        ERROR,
        "The keeper of a host has ended and will not return",
        "Nothing starts a rank there. The others continue without it, or wait if ddp_min_hosts requires it.",
        "Start it: ansible-playbook nanochat.ddp.join -i INVENTORY -e target=HOST",
        (35,),
    ),
    "run-given-up": Kind(
        ERROR,
        "The run failed too often and was given up",
        "It failed three times at one step, or more than ddp_restarts times within an hour.",
        "Remove the cause of the last failure, or raise ddp_restarts; then: ansible-playbook train.yml -i INVENTORY --tags restart",
    ),
    "rank-not-examined": Kind(
        ERROR,
        "The evidence of a rank could not be gathered",
        "Nothing certain can be said about the run without it.",
        "Remove the cause named, then: ansible-playbook nanochat.ddp.doctor -i INVENTORY",
    ),
    "rank-oom": Kind(
        ERROR,
        "A rank was killed by the kernel: out of memory (OOM)",
        "The kernel kills the process that uses most memory; the other ranks then wait for it.",
        "Lower ddp_device_batch, or stop whatever else uses the memory; then restart: the run resumes from its newest checkpoint.",
        (19,),
        ("Out of memory: Killed process", "exitcode: -9", "can't allocate memory"),
    ),
    "rank-killed": Kind(
        ERROR,
        "A rank was killed by a signal",
        "Something on that host sent SIGKILL; the kernel reports no lack of memory.",
        "Find out what did, then restart: the run resumes from its newest checkpoint.",
        (19,),
        ("exitcode: -9", "SIGKILL", "Connection closed by peer"),
    ),
    "rank-vanished": Kind(
        ERROR,
        "A rank disappeared without an exit status",
        "The machine restarted, or the whole session was killed.",
        "Restart: the run resumes from the newest checkpoint that any rank has.",
        (12, 18),
        ("Connection closed by peer",),
    ),
    "rank-failed": Kind(
        ERROR,
        "A rank ended with an error of its own",
        "The other ranks wait for it, or end because it is gone.",
        "Read the error, remove its cause, then restart: the run resumes from its newest checkpoint.",
        (14, 19),
        ("ChildFailedError", "Connection closed by peer"),
    ),
    "loss-not-finite": Kind(
        ERROR,
        "The loss is infinite or not a number",
        "The weights are useless after that step, so training ends.",
        "Lower the learning rates (ddp_extra_args), then restart: the run resumes from its newest checkpoint.",
        (),
        ("loss: nan", "loss: inf"),
    ),
    "rank-not-started": Kind(
        ERROR,
        "A rank was never started, or has ended, while others wait",
        "A run works only if all of its ranks run.",
        "Restart the whole run: ansible-playbook train.yml -i INVENTORY --tags restart",
        (19, 20),
        ("1/2 clients joined",),
    ),
    "rank-frozen": Kind(
        ERROR,
        "The process of a rank is suspended",
        "It received SIGSTOP, or a terminal or debugger holds it; it uses no CPU and the others wait.",
        "Continue it with kill -CONT and the number given; the run then continues where it stopped.",
        (19,),
    ),
    "rank-in-kernel": Kind(
        ERROR,
        "A rank hangs in the kernel",
        "Usually a disk or a network file system does not respond.",
        "Look at dmesg on that host. When the disk responds again the run continues; otherwise restart it.",
        (19,),
    ),
    "rank-slow": Kind(
        WARNING,
        "A rank is slow, not stuck",
        "Every step waits for the slowest rank.",
        "Reduce the load on that host, or give it fewer rows: ddp_batch_split=speed.",
        (16, 17),
    ),
    "rank-stuck": Kind(
        ERROR,
        "A rank did not arrive at a collective",
        "The others wait for it there; its stack shows where it is.",
        "Restart the run, and keep the evidence: it shows the line that the rank was at.",
        (19, 20),
        ("Timed out waiting for recv operation to complete",),
    ),
    "link-cut": Kind(
        ERROR,
        "Packets between two hosts are lost",
        "A cable, a Wi-Fi link or a firewall between them drops packets; each side waits for the other.",
        "Check the link and the firewalls: ansible-playbook nanochat.ddp.preflight -i INVENTORY; then restart.",
        (1, 19),
        ("Timed out waiting for recv operation to complete", "Gloo connectFullMesh failed", "Connect timeout"),
    ),
    "data-mismatch": Kind(
        ERROR,
        "A rank has no data, or different data from the others",
        "One rank ends or waits for data while the others wait for it.",
        "Copy the same shards to all hosts: ansible-playbook train.yml -i INVENTORY --tags data; then restart.",
        (7, 8),
        ("no parquet files", "row groups"),
    ),
    "disk-full": Kind(
        ERROR,
        "A host has no disk space left",
        "Checkpoints and logs cannot be written; the last complete checkpoint is kept.",
        "Free space on that host, or lower ddp_keep_checkpoints; then restart.",
        (18,),
        ("No space left on device",),
    ),
    "settings-differ": Kind(
        ERROR,
        "The ranks were started with different settings",
        "They would train different models, or hang at the first collective.",
        "Start all ranks from one plan: ansible-playbook train.yml -i INVENTORY --tags restart",
        (8, 9),
    ),
    "weights-differ": Kind(
        ERROR,
        "The ranks' weights are not identical",
        "They no longer train one model. Different libraries, bad memory or a bug in nanochat.ddp can cause that.",
        "Restart from the last checkpoint. If it happens again, test the memory of the hosts and compare their torch versions.",
        (21,),
    ),
    "not-running": Kind(
        INFO,
        "No rank runs",
        "The run has ended or was never started.",
        "To start it: ansible-playbook train.yml -i INVENTORY",
    ),
    "healthy": Kind(
        INFO,
        "All ranks are healthy and make progress",
        "Nothing is wrong.",
        "No action needed.",
    ),
    "healthy-slow": Kind(
        WARNING,
        "All ranks make progress, but slower than they could",
        "Every step waits for the slowest rank.",
        "Reduce the load on the host named.",
        (16,),
    ),
}
