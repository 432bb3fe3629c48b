# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the doctor can say of a run that is stuck or has ended."""

from __future__ import annotations

from typing import Dict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.kind import ERROR, INFO, WARNING, Kind

KINDS: Dict[str, Kind] = {
    "rank-host-no-answer": Kind(
        ERROR,
        "A host of the run gives no answer",
        "The other ranks wait for it at the next collective until their timeout.",
        "See that the machine is on and awake and its network is up, then: ansible-playbook train.yml -i INVENTORY --tags restart",
        (12, 19),
        ("UNREACHABLE", "Connection timed out", "No route to host"),
    ),
    "rank-away": Kind(
        WARNING,
        "A host is not in the run, which goes on without it",
        "With ddp_restarts and ddp_min_hosts the others go on when a host is lost or taken out; the run is slower for it.",
        "A host whose keeper runs is let in by itself; else: ansible-playbook nanochat.ddp.join -i INVENTORY -e target=HOST",
        (35,),
    ),
    "rank-not-examined": Kind(
        ERROR,
        "The evidence of a rank could not be gathered",
        "Without it nothing can be said for certain about the run.",
        "Remove the cause that is named, then: ansible-playbook nanochat.ddp.doctor -i INVENTORY",
    ),
    "rank-oom": Kind(
        ERROR,
        "A rank was killed by the kernel: out of memory (OOM)",
        "The kernel ends the process that uses most; the other ranks then wait for it.",
        "Lower ddp_device_batch, or end what else uses the memory; then restart: the run goes on from its newest checkpoint.",
        (19,),
        ("Out of memory: Killed process", "exitcode: -9", "can't allocate memory"),
    ),
    "rank-killed": Kind(
        ERROR,
        "A rank was killed by a signal",
        "Somebody or something on that host sent SIGKILL; the kernel says nothing of memory.",
        "Find out who did, then restart: the run goes on from its newest checkpoint.",
        (19,),
        ("exitcode: -9", "SIGKILL", "Connection closed by peer"),
    ),
    "rank-vanished": Kind(
        ERROR,
        "A rank disappeared without an exit status",
        "The machine restarted, or the whole session was killed.",
        "Restart: the run goes on from the newest checkpoint that any rank has.",
        (12, 18),
        ("Connection closed by peer",),
    ),
    "rank-failed": Kind(
        ERROR,
        "A rank ended with an error of its own",
        "The other ranks wait for it, or end because it is gone.",
        "Read the error; when its cause is gone, restart: the run goes on from its newest checkpoint.",
        (14, 19),
        ("ChildFailedError", "Connection closed by peer"),
    ),
    "loss-not-finite": Kind(
        ERROR,
        "The loss is infinite or not a number",
        "The weights after that step are invalid, so training ends.",
        "Lower the learning rates (ddp_extra_args), then restart: the run goes on from its newest checkpoint.",
        (),
        ("loss: nan", "loss: inf"),
    ),
    "rank-not-started": Kind(
        ERROR,
        "A rank was never started, or has ended, while others wait",
        "A run lives or ends as a whole.",
        "Restart the whole run: ansible-playbook train.yml -i INVENTORY --tags restart",
        (19, 20),
        ("1/2 clients joined",),
    ),
    "rank-frozen": Kind(
        ERROR,
        "A rank's process is stopped",
        "It was sent SIGSTOP, or its terminal or a debugger holds it; it uses no CPU and the others wait.",
        "Let it go on with kill -CONT and the number given; the run then continues where it stands.",
        (19,),
    ),
    "rank-in-kernel": Kind(
        ERROR,
        "A rank hangs in the kernel",
        "Usually a disk or a network file system that does not answer.",
        "Look at dmesg on that host; when the disk answers again the run continues, else restart it.",
        (19,),
    ),
    "rank-slow": Kind(
        WARNING,
        "A rank is slow, not stuck",
        "Every step waits for the slowest rank.",
        "Take the load off that host, or give it fewer rows: ddp_batch_split=speed.",
        (16, 17),
    ),
    "rank-stuck": Kind(
        ERROR,
        "A rank did not arrive at a collective",
        "The others wait there for it; its stack says where it stands.",
        "Restart the run, and keep the evidence: it shows the line at which that rank stood.",
        (19, 20),
        ("Timed out waiting for recv operation to complete",),
    ),
    "link-cut": Kind(
        ERROR,
        "Packets between two hosts are lost",
        "A cable, a Wi-Fi link or a firewall between them; each side waits for the other.",
        "Check the link and the firewalls: ansible-playbook nanochat.ddp.preflight -i INVENTORY; then restart.",
        (1, 19),
        ("Timed out waiting for recv operation to complete", "Gloo connectFullMesh failed", "Connect timeout"),
    ),
    "data-mismatch": Kind(
        ERROR,
        "A rank has no data, or other data than the rest",
        "One rank ends or waits for data while the others wait for it.",
        "Bring the same shards to all hosts: ansible-playbook train.yml -i INVENTORY --tags data; then restart.",
        (7, 8),
        ("no parquet files", "row groups"),
    ),
    "disk-full": Kind(
        ERROR,
        "A host has no disk space left",
        "Checkpoints and logs cannot be written; the last whole checkpoint is kept.",
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
        "They no longer train one model. Different libraries, broken memory or a fault of ours can do that.",
        "Restart from the last checkpoint; if it happens again, test that host's memory and compare the torch versions.",
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
        "There is nothing to repair.",
        "Nothing to do.",
    ),
    "healthy-slow": Kind(
        WARNING,
        "All ranks make progress, but slower than they could",
        "Every step waits for the slowest rank.",
        "Take the load off the host that is named.",
        (16,),
    ),
}
