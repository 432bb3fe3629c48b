# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The catalogue of all that preflight, plan, watch and doctor can find: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so a search for the words that a user saw leads to the remedy.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

ERROR = "error"
WARNING = "warning"
INFO = "info"


class Kind(NamedTuple):
    """What one code means, wherever it is found."""

    severity: str
    title: str
    why: str
    remedy: str
    field: Tuple[int, ...] = ()  # entries of the list of field failures that this code answers
    seen_as: Tuple[str, ...] = ()  # texts by which people search for it


CATALOGUE: Dict[str, Kind] = {}

# What the plan finds in settings and probes.
CATALOGUE.update(
    {
        "plan-obstacle": Kind(
            ERROR,
            "The run could not start as things are",
            "The plan would refuse to start a run; looking at one and stopping it still work.",
            "Do what the sentence says before the next start.",
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
            "A host takes part by radio",
            "Each step waits for the slowest link, and a radio link is slow and uneven.",
            "Connect the host by cable, or set ddp_sync=bf16 to halve what is sent.",
            (3, 25),
        ),
        "nic-overlay": Kind(
            WARNING,
            "Training takes an overlay or a virtual network",
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
        "threads-over-cores": Kind(
            WARNING,
            "More threads than processors",
            "Threads that wait for a processor make every step slower than fewer threads would.",
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
)


# What the doctor can say of a run that stands still or died.
CATALOGUE.update(
    {
        "rank-host-unreachable": Kind(
            ERROR,
            "A host of the run cannot be reached",
            "The other ranks wait for it at the next collective until their timeout.",
            "See that the machine is on and awake and its network is up, then: ansible-playbook train.yml -i INVENTORY --tags restart",
            (12, 19),
            ("UNREACHABLE", "Connection timed out", "No route to host"),
        ),
        "rank-oom": Kind(
            ERROR,
            "A rank was ended for want of memory",
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
            "A rank is gone without a word",
            "The machine restarted, or the whole session was killed.",
            "Restart: the run goes on from the newest checkpoint that all ranks have.",
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
            "A cable, a radio link or a firewall between them; each side waits for the other.",
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
            "There is nothing to mend.",
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
)


def finding(
    code: str,
    host: str,
    seen: str,
    peer: Optional[str] = None,
    remedy: Optional[str] = None,
    severity: Optional[str] = None,
) -> Dict[str, Any]:
    """One finding as every part of the collection passes it on; remedy and severity default to the catalogue's."""
    kind = CATALOGUE[code]
    return {
        "code": code,
        "severity": severity or kind.severity,
        "host": host,
        "peer": peer,
        "seen": seen,
        "why": kind.why,
        "remedy": remedy or kind.remedy,
    }


def errors(findings: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Those that stop a run."""
    return [found for found in findings if found["severity"] == ERROR]
