# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The catalogue of all that preflight, plan, watch and doctor can find: one code, one meaning, one remedy.

docs/troubleshooting.md is generated from it, so a search for the words that a user saw leads to the remedy.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

ERROR = "error"
WARNING = "warning"
INFO = "info"


# Makes a Python below the user's home, where the probe looks for it; uv's wheel runs on any Linux with an older Python.
MAKE_PYTHON = "python3 -m venv ~/uv && ~/uv/bin/pip install uv==0.13.9 && ~/uv/bin/uv python install 3.12"


class Kind(NamedTuple):
    """What one code means, wherever it is found."""

    severity: str
    title: str
    why: str
    remedy: str
    field: Tuple[int, ...] = ()  # entries of the list of field failures that this code answers
    seen_as: Tuple[str, ...] = ()  # texts by which people search for it


Finding = Dict[str, Any]
CATALOGUE: Dict[str, Kind] = {}

# What the plan finds in settings and probes.
CATALOGUE.update(
    {
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
            "A host takes part by radio",
            "Each step waits for the slowest link, and a radio link is slow and uneven.",
            "Connect the host by cable, or set ddp_sync=bf16 to halve what is sent, and ddp_local_steps=10 to send seldom.",
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
        "trainer-apart": Kind(
            WARNING,
            "The trainer does not exchange gradients on CPUs",
            "nanochat's own joins a process group with CUDA only: on CPUs its ranks train a model each, or end with an error.",
            "Take this collection's trainer (ddp_trainer_source=ours), train on one host (-e target=HOST), or on GPUs.",
            (21,),
            ("Default process group has not been initialized",),
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
)


# What preflight finds when it tries the plan.
CATALOGUE.update(
    {
        "host-down": Kind(
            ERROR,
            "A host does not answer over SSH",
            "Without it the others wait at the rendezvous until their timeout.",
            "See that it is on and awake and that you can log in to it with ssh as Ansible does.",
            (12, 19),
            ("UNREACHABLE", "Connection timed out", "Permission denied (publickey)"),
        ),
        "evidence-missing": Kind(
            ERROR,
            "Something could not be tried on a host",
            "Nothing known is not nothing found: the run might fail for a reason that was never looked at.",
            "See that the host is still there, and try again.",
        ),
        "port-blocked": Kind(
            ERROR,
            "A firewall lets no connection through to a port of the job",
            "Ranks connect to each other on the rendezvous port and on any port of the data range, in both directions. A dropped "
            "packet says nothing, so training would hang at its first collective.",
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
        "port-to-be-opened": Kind(
            INFO,
            "A port is closed now and will be opened by the network step",
            "The firewall in force is known and may be changed here.",
            "Nothing to do: the step network opens it to the peers only.",
            (1,),
        ),
        "no-sudo": Kind(
            ERROR,
            "The firewall of a host has to be opened by its owner",
            "A port of the job is closed there, and this user has no root rights without a password.",
            "Have the owner of the host run the commands.",
            (2,),
            ("sudo: a password is required", "Missing sudo password"),
        ),
        "no-way": Kind(
            ERROR,
            "One host cannot reach another at all",
            "Every rank has to reach every other one.",
            "Check the cable or radio link, that both addresses are in one network, and any firewall or client isolation of the "
            "router between them.",
            (1, 3, 5, 19),
            ("No route to host", "Network is unreachable", "Connect timeout"),
        ),
        "peer-not-listening": Kind(
            ERROR,
            "A host could not listen on its address of the plan",
            "The others would connect to nobody.",
            "Set ddp_address or ddp_nic of that host to an address that it has.",
            (3, 4),
            ("Cannot assign requested address", "Unable to find address for"),
        ),
        "port-held": Kind(
            ERROR,
            "The rendezvous port is taken",
            "Often it is what an earlier try left behind; torchrun would end with EADDRINUSE, or meet the wrong run.",
            "End that process if nobody needs it, or set ddp_port to a free port.",
            (6,),
            ("EADDRINUSE", "Address already in use", "The server socket has failed to listen"),
        ),
        "stale-ranks": Kind(
            WARNING,
            "Processes of an earlier run of this collection are still there",
            "They take cores and memory, and perhaps the rendezvous port.",
            "End them: ansible-playbook nanochat.ddp.stop -i INVENTORY; launching does it for the same run, too.",
            (6, 23),
            ("EADDRINUSE", "Address already in use"),
        ),
        "name-is-loopback": Kind(
            INFO,
            "A name of a host leads to itself only",
            "A peer that were told this name would connect to itself. The plan uses addresses, so it does no harm here.",
            "Nothing to do for this job; by hand, use addresses or take the 127.0.1.1 line out of /etc/hosts.",
            (4,),
            ("remote=[127.0.0.1]", "remote=[127.0.1.1]", "Connection refused, remote=[::1]"),
        ),
        "ip-family-mix": Kind(
            ERROR,
            "Some hosts are to be reached by IPv4 and others by IPv6",
            "An address of one kind cannot connect to one of the other.",
            "Give every host an address of the same kind as ddp_address.",
            (4,),
            ("Address family not supported", "Invalid argument"),
        ),
        "nic-down": Kind(
            ERROR,
            "The network interface of the plan is down or gone",
            "Gloo looks for it by name and ends at once, or waits for packets that cannot leave.",
            "Plug it in or bring it up (sudo ip link set NIC up), or set ddp_nic of that host to another one.",
            (3,),
            ("Unable to find address for",),
        ),
        "nic-half-duplex": Kind(
            WARNING,
            "A network card speaks half duplex",
            "It cannot send and receive at the same time, as every exchange of gradients does. The two ends failed to agree, often "
            "because one of them is set by hand or the cable is bad.",
            "Let both ends negotiate: sudo ethtool -s NIC autoneg on; then try another cable or port of the switch.",
            (3, 16),
        ),
        "route-differs": Kind(
            WARNING,
            "Packets to a peer leave by another interface than the plan's",
            "They may take the slower one, or arrive with an address that the peer's firewall does not know.",
            "Set ddp_nic and ddp_address to the interface that leads to the peers, or mend the route.",
            (3,),
        ),
        "route-over-overlay": Kind(
            WARNING,
            "Packets to a peer go through an overlay network",
            "Tailscale, WireGuard and the like encrypt every packet and may take a detour; each step waits for that.",
            "Use the addresses of the common network (ddp_address), or take the peers' network out of the overlay's routes.",
            (5,),
            ("tailscale0", "wg0"),
        ),
        "route-over-bridge": Kind(
            WARNING,
            "Packets to a peer go to a bridge of containers or virtual machines",
            "Such a network usually ends on the host itself.",
            "Set ddp_nic and ddp_address to the interface that leads to the peers.",
            (3, 5),
            ("docker0", "virbr0"),
        ),
        "mtu-too-large": Kind(
            ERROR,
            "Large packets vanish on the way to a peer",
            "Connections come up and small messages pass, but the first gradient never arrives.",
            "Lower the MTU of the interface, or raise it on every switch and host in between.",
            (1, 5),
            ("Timed out waiting for recv operation to complete",),
        ),
        "link-unmeasured": Kind(
            WARNING,
            "A connection came up, but could not be measured",
            "The link may be cut off and on, or very slow.",
            "Try again; if it stays, look for packet loss with ping and for errors with ip -s link.",
            (19,),
        ),
        "link-slow": Kind(
            WARNING,
            "A link is slow for exchanging gradients",
            "Every step sends each rank's gradients over it.",
            "Use a cable and a gigabit switch, set ddp_sync=bf16 to halve what is sent, set ddp_local_steps=10 to send seldom, or "
            "train on one host.",
            (3, 16, 25),
        ),
        "link-below-nominal": Kind(
            WARNING,
            "A link carries much less than its speed",
            "A cable of the wrong kind, another transfer, or a slow CPU in between.",
            "See what else uses the link, and whether ethtool NIC says full duplex.",
            (3, 16),
        ),
        "link-delay": Kind(
            WARNING,
            "Round trips to a peer are slow",
            "A step needs several dependent rounds; each costs this delay. Radio links that save power have such delays.",
            "Use a cable, or switch off power saving of the radio (iw dev NIC set power_save off).",
            (25,),
        ),
        "clock-skew": Kind(
            WARNING,
            "The clocks of two hosts differ",
            "Logs and figures of the ranks cannot be put side by side, and certificates may be refused.",
            "Set the clock by the network: sudo timedatectl set-ntp true",
        ),
        "torch-differs": Kind(
            ERROR,
            "The ranks have different versions of PyTorch",
            "Their messages and their rounding may differ.",
            "Bring all to the plan's version: ansible-playbook train.yml -i INVENTORY --tags trainer",
            (9,),
        ),
        "python-differs": Kind(
            INFO,
            "The ranks have different versions of Python",
            "It works; versions of some packages may differ.",
            "Set ddp_python to the same version on every host if you want them alike.",
        ),
        "trainer-differs": Kind(
            ERROR,
            "The trainer's files differ between hosts",
            "Ranks that run different code may hang or train different models.",
            "Bring all to one state: ansible-playbook train.yml -i INVENTORY --tags trainer",
            (9, 24),
        ),
        "data-differs": Kind(
            ERROR,
            "The shards or the tokenizer differ between hosts",
            "One rank would reach the end while others wait for it, or they would learn from different tokens.",
            "Bring the same shards to all hosts: ansible-playbook train.yml -i INVENTORY --tags data",
            (7, 8),
            ("no parquet files", "StopIteration"),
        ),
        "cpu-features-differ": Kind(
            INFO,
            "The CPUs have different instructions for matrix products",
            "The ranks run at different speeds; their weights stay the same.",
            "Nothing to do; ddp_batch_split=speed gives the faster host more rows.",
            (10, 17),
        ),
        "bf16-not-native": Kind(
            ERROR,
            "bfloat16 on a CPU that has no instructions for it",
            "It is emulated and many times slower, which looks like a deadlock.",
            "Set ddp_dtype=float32 and ddp_matmul=fp32.",
            (10,),
        ),
        "host-busy": Kind(
            WARNING,
            "Something else uses the CPU of a host",
            "Every step waits for the slowest rank.",
            "Look at it with top; end it, or start when it is done.",
            (17,),
        ),
        "memory-short": Kind(
            ERROR,
            "A host has less memory than its rank needs",
            "The kernel would end the rank when the memory is used up.",
            "Lower ddp_depth, ddp_device_batch or ddp_sequence.",
            (15,),
            ("Out of memory", "can't allocate memory"),
        ),
        "disk-short": Kind(
            ERROR,
            "A host has too little room for checkpoints, data and software",
            "A checkpoint that cannot be written ends the run.",
            "Set ddp_base_dir to a larger disk, or lower ddp_keep_checkpoints.",
            (18,),
            ("No space left on device",),
        ),
        "folder-read-only": Kind(
            ERROR,
            "The base folder cannot be written",
            "Everything of a job lies below it.",
            "Set ddp_base_dir to a folder of that user.",
            (24,),
            ("Permission denied", "Read-only file system"),
        ),
        "folder-noexec": Kind(
            ERROR,
            "Programs may not be run from the base folder's file system",
            "PyTorch's libraries lie in the environment below it and could not be loaded.",
            "Set ddp_venv_dir to a folder on a file system without the option noexec.",
            (),
            ("failed to map segment from shared object", "Operation not permitted"),
        ),
        "folder-shared": Kind(
            ERROR,
            "Two nodes use the same folder",
            "They would overwrite each other's files.",
            "Give each host a ddp_base_dir of its own.",
            (24,),
        ),
        "no-tmux": Kind(
            ERROR,
            "A host has no tmux",
            "Training runs in a tmux session, so that it outlives the connection.",
            "Have its owner install it: sudo apt-get install tmux (or dnf, pacman, apk).",
            (12,),
            ("tmux: command not found",),
        ),
        "python-too-old": Kind(
            ERROR,
            "A host has no Python that PyTorch runs on",
            "PyTorch needs 3.10 or newer.",
            f"Without root, its user makes one that is found by itself: {MAKE_PYTHON}. Or set ddp_python to the path of another.",
            (),
            ("No matching distribution found for torch", "requires a different Python"),
        ),
        "architecture-differs": Kind(
            ERROR,
            "The hosts are of different architectures, or of one without PyTorch",
            "They round differently, so the ranks' weights would drift apart.",
            "Use hosts of one architecture, x86_64 or aarch64.",
            (21,),
        ),
        "mac-lsm-blocks": Kind(
            WARNING,
            "SELinux or AppArmor may keep the ranks from what they need",
            "A denied action looks like a missing right, whatever the file modes say.",
            "Look for denials (sudo ausearch -m avc -ts recent, or sudo dmesg | grep DENIED) and allow them.",
            (),
            ("Permission denied", "avc:  denied", 'apparmor="DENIED"'),
        ),
        "ulimit-low": Kind(
            WARNING,
            "A limit of this user is low for training",
            "Each rank opens a connection to every other one, starts a thread for each core, holds its memory and writes checkpoints.",
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
            "It is what every step of the training does.",
            "See the findings about ports, routes and firewalls; they usually name the reason.",
            (1, 3, 19, 21),
            ("Gloo connectFullMesh failed", "DistNetworkError", "Connection closed by peer"),
        ),
        "gloo-not-tried": Kind(
            INFO,
            "No all-reduce was tried",
            "The trainer's Python is not on every host yet, or a closed port would only make it wait.",
            "Nothing to do: training brings the trainer and rehearses before it starts, once the ways are open.",
        ),
        "step-not-measured": Kind(
            INFO,
            "A training step could not be measured",
            "Without it the speed cannot be predicted.",
            "The sentence says why; training itself may still work.",
        ),
        "run-in-progress": Kind(
            INFO,
            "The run is in progress, so what would disturb it was not tried",
            "The ports, links and cores are in use.",
            "See how it stands: ansible-playbook nanochat.ddp.status -i INVENTORY",
        ),
        "not-worth-it": Kind(
            WARNING,
            "All hosts together are hardly faster than one of them",
            "Each step the ranks wait for the exchange of gradients and for the slowest of them.",
            "Train on one host: ansible-playbook train.yml -i INVENTORY -e target=HOST",
            (16, 25),
        ),
        "use-bf16-wire": Kind(
            INFO,
            "Sending bfloat16 would make each step shorter",
            "It halves the bytes between the hosts; sums are still made in float32 at the ends.",
            "Set ddp_sync=bf16.",
            (16,),
        ),
        "use-local-steps": Kind(
            INFO,
            "Meeting seldom would make more of a slow link",
            "Each step waits for the link. With local steps the hosts train apart and take the mean of what they changed every "
            "so many steps; a step then teaches somewhat less.",
            "Set ddp_local_steps=10 if the link cannot be made faster.",
            (16, 25),
        ),
        "use-cable": Kind(
            INFO,
            "A cable would make each step shorter",
            "A host takes part by radio, and each step waits for its link.",
            "Connect it by cable; the prediction for one gigabit is given.",
            (16, 25),
        ),
        "rows-unbalanced": Kind(
            INFO,
            "Another split of the rows would make each step shorter",
            "The hosts differ in speed and have the same number of rows, so the faster one waits.",
            "Set ddp_batch_split=speed.",
            (17,),
        ),
    }
)


# What the doctor can say of a run that stands still or died.
CATALOGUE.update(
    {
        "rank-host-no-answer": Kind(
            ERROR,
            "A host of the run gives no answer",
            "The other ranks wait for it at the next collective until their timeout.",
            "See that the machine is on and awake and its network is up, then: ansible-playbook train.yml -i INVENTORY --tags restart",
            (12, 19),
            ("UNREACHABLE", "Connection timed out", "No route to host"),
        ),
        "rank-not-examined": Kind(
            ERROR,
            "The evidence of a rank could not be gathered",
            "Without it nothing can be said for certain about the run.",
            "Remove the cause that is named, then: ansible-playbook nanochat.ddp.doctor -i INVENTORY",
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
    facts: Optional[Mapping[str, Any]] = None,
) -> Finding:
    """One finding as every part of the collection passes it on; remedy and severity default to the catalogue's.

    Facts are what programs may want of the sentence (such as pids): nothing is ever read out of a sentence again.
    """
    kind = CATALOGUE[code]
    return {
        "code": code,
        "severity": severity or kind.severity,
        "host": host,
        "peer": peer,
        "seen": seen,
        "why": kind.why,
        "remedy": remedy or kind.remedy,
        "facts": dict(facts or {}),
    }


def sentence(found: Finding) -> str:
    """What was seen, with a mark at its end."""
    seen = str(found["seen"])
    return seen if seen.endswith(("?", "!")) else seen.rstrip(".") + "."


def refusal_text(findings: Sequence[Finding]) -> str:
    """What people read where a plan is refused: every problem, one sentence each."""
    sentences = [sentence(found) for found in findings]
    if len(sentences) == 1:
        return sentences[0]
    return "\n".join([f"{len(sentences)} problems; nothing was changed:", *["- " + text for text in sentences]])
