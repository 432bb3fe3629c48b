# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two container hosts of the campaign, reached by ssh, with a small disk each for what the product keeps."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Two series at the same time need networks of their own.
SUBNET = os.environ.get("CAMPAIGN_SUBNET", "10.89.80")
NETWORK = f"ddp-campaign-{SUBNET.rpartition('.')[2]}"
NAMES = ("desktop", "laptop")
USER = {"desktop": "lzw", "laptop": "xiaoxin"}
ADDRESS = {"desktop": f"{SUBNET}.11", "laptop": f"{SUBNET}.12"}
BASE = "/mnt/nanochat"
DISK_MEGABYTES = 400
VENV = "/opt/trainer-venv"
# Short texts: what the loaders have read ahead is a part of every checkpoint.
TEXT = "/srv/text"
KEPT = "/var/tmp/kept"
# Steps wait for the link rather than for a processor, so that a training takes long enough to be disturbed without much computing.
LINK = "rate 50mbit latency 100ms"
SLOW = "rate 2mbit latency 400ms"
SLOWER = "rate 8mbit latency 100ms"  # than usual, but no trouble for a playbook
# The same for all: a packet of up to 64 KB that waits when a smaller burst is set would never get through, nor any behind it.
BURST = "burst 64kb"
# Files of a checkpoint to one digest, whatever the order in which they were written.
DIGEST = """
import hashlib, pathlib, sys, torch
digest, routes = hashlib.sha256(), []  # the matrix libraries by rank
def feed(name, value):
    if isinstance(value, torch.Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            if key == "route":
                routes.append(value[key])
            feed(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            feed(f"{name}.{number}", one)
    else:
        digest.update(f"{name}={value!r}".encode())
paths = sorted(pathlib.Path(sys.argv[1]).glob(sys.argv[2]))
if len(paths) < 2:
    sys.exit(f"weights and optimizer are not in {sys.argv[1]}")
for path in paths:
    feed(path.name, torch.load(path, weights_only=True, map_location="cpu"))
print(digest.hexdigest()[:16], *routes)
"""


class HostError(Exception):
    """A host could not be brought into a state; that is a fault of this campaign, not of what it tries."""


def command(*argv: str, check: bool = True, seconds: float = 180.0) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise HostError(f"{' '.join(argv)}: no answer within {seconds:.0f} s") from None
    if check and done.returncode != 0:
        raise HostError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def as_root(*argv: str, check: bool = True) -> str:
    return command(*([] if os.getuid() == 0 else ["sudo", "-n"]), *argv, check=check)


def container(host: str) -> str:
    return f"{NETWORK}-{host}"


def on(host: str, script: str, check: bool = True) -> str:
    """A shell script as root of the host, past ssh and past whatever fault is on its network."""
    return command("podman", "exec", container(host), "bash", "-c", script, check=check)


def until(what: str, true: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        if time.monotonic() > end:
            raise HostError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)


def freeze(host: str) -> None:
    """The container's runtime refuses as long as something is being started in there."""

    def frozen() -> bool:
        command("podman", "pause", container(host), check=False)
        return command("podman", "inspect", "-f", "{{.State.Status}}", container(host)).strip() == "paused"

    until(f"{host} is frozen", frozen)


def limit_link(host: str, limit: str = LINK) -> None:
    on(host, f"tc qdisc replace dev eth0 root tbf {limit} {BURST}")


def cable(host: str, state: str) -> None:
    """Pull the host's network cable (down) or plug it in (up): the other end is an interface of this machine."""
    number = on(host, "cat /sys/class/net/eth0/iflink").strip()
    for link in json.loads(command("ip", "-json", "link")):
        if str(link["ifindex"]) == number:
            as_root("ip", "link", "set", link["ifname"], state)
            return
    raise HostError(f"{host}: no interface of this machine has the number {number}")


class Hosts:
    """Makes the hosts and their inventory; takes both away again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inventory = folder / "inventory"
        self.image = os.environ["TEST_IMAGE"] + "-trained"
        self.key = Path(os.environ["TEST_SSH_KEY"] + ".pub").read_text(encoding="ascii").strip()

    def make(self) -> None:
        self.remove()
        command("podman", "network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
        for host in NAMES:
            self._make(host)
        self._write_inventory()

    def _make(self, host: str) -> None:
        disk = self.folder / f"disk-{host}"
        disk.mkdir()
        as_root("mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m,mode=0755", "nanochat-ddp-campaign", str(disk))
        command(
            "podman", "run", "-d", "--init", "--name", container(host), "--hostname", host,
            "--network", f"{NETWORK}:ip={ADDRESS[host]},interface_name=eth0", "--cap-add", "NET_ADMIN,NET_RAW,SYS_PTRACE,AUDIT_WRITE",
            "--volume", f"{disk}:{BASE}", self.image,
        )  # fmt: skip
        home, user = f"/home/{USER[host]}", f"{USER[host]}:"
        on(host, f"chown {user} {BASE} && mkdir -m 700 {home}/.ssh {KEPT} && chown {user} {home}/.ssh")
        on(host, f"echo '{self.key}' >{home}/.ssh/authorized_keys && chown {user} {home}/.ssh/authorized_keys")
        on(
            host,
            f"mkdir {TEXT} && cat /usr/lib/python3.11/[a-d]*.py | split -l 12 -a 4 --additional-suffix=.py - {TEXT}/part-",
        )
        (self.folder / "digest.py").write_text(DIGEST, encoding="ascii")
        command("podman", "cp", str(self.folder / "digest.py"), f"{container(host)}:/opt/digest.py")
        if host == "desktop":  # the laptop's user has no sudo
            on(host, "ufw allow 22/tcp && ufw --force enable")
        limit_link(host)

    def _write_inventory(self) -> None:
        (self.inventory / "group_vars").mkdir(parents=True)
        hosts = {
            host: {"ansible_host": ADDRESS[host], "ansible_user": USER[host], "ddp_base_dir": BASE} for host in NAMES
        }
        (self.inventory / "hosts.yml").write_text(json.dumps({"trainers": {"hosts": hosts}}), encoding="ascii")

    def settings(self, values: dict[str, Any]) -> None:
        (self.inventory / "group_vars" / "trainers.yml").write_text(json.dumps(values), encoding="ascii")

    def remove(self) -> None:
        command("podman", "rm", "-f", "-i", "-t", "1", *(container(host) for host in NAMES), check=False)
        command("podman", "network", "rm", "-f", NETWORK, check=False)
        for host in NAMES:
            disk = self.folder / f"disk-{host}"
            if disk.is_mount():
                as_root("umount", "-l", str(disk))

    # -- power

    def power_off(self, host: str) -> None:
        command("podman", "kill", "--signal", "KILL", container(host))

    def power_on(self, host: str) -> None:
        """Like a restart of the machine: its disk survives, its memory does not."""
        command("podman", "start", container(host))
        until(f"{host} is up", lambda: on(host, "pgrep -x sshd && echo up", check=False))
        on(host, "find /tmp -mindepth 1 -delete; rm -rf /dev/shm/*", check=False)
        limit_link(host)
        if host == "desktop":
            on(host, "ufw --force enable")

    # -- the run folder, kept in a state from which rounds begin

    def keep(self, run: str, name: str) -> None:
        for host in NAMES:
            on(host, f"rm -rf {KEPT}/{name} && cp -a {BASE}/runs/{run} {KEPT}/{name}")

    def restore(self, run: str, name: str | None) -> None:
        for host in NAMES:
            on(
                host,
                f"rm -rf {BASE}/runs/{run} {BASE}/filler && {f'cp -a {KEPT}/{name} {BASE}/runs/{run}' if name else 'true'}",
            )

    def end_all(self) -> None:
        """End what a failed round left."""
        for host in NAMES:
            for word in ("unpause", "kill"):  # whether it is frozen, off or neither
                command("podman", word, container(host), check=False)
            self.power_on(host)

    # -- what is looked at

    def rulesets(self) -> dict[str, str]:
        """The firewall of each host without its counters, and without forwarding, which the container runtime may turn on."""
        plain = "sed 's/\\[[0-9]*:[0-9]*\\]//; /^#/d'"
        ufw = "ufw status verbose | sed 's/, [a-z]* (routed)//'"
        script = f"iptables-save | {plain}; ip6tables-save | {plain}; {ufw} || true"
        return {host: on(host, script) for host in NAMES}

    def processes(self) -> dict[str, list[str]]:
        """Processes on each host, except observers and prompts; names generated for a single start are left out.

        With what has ended and is not asked for by its parent stands that parent. The program of a pane that tmux keeps on
        show is left out: it has ended, and tmux 3.3 at times asks for it only when the next one ends.
        """
        ours = ("ps -eo", "bash -c", "sshd", "awk ", "sed -E", "catatonit", "podman-init")
        script = (
            "ps -eo pid=,ppid=,user:20=,args= | "
            """awk '{ p = $1; of[p] = $2; $1 = $2 = ""; line[p] = $0 } END { for (p in line) """
            """{ ended = line[p] ~ /<defunct>/; if (!ended || line[of[p]] !~ /tmux/) """
            """print line[p] (ended ? ", of " line[of[p]] : "") } }' | """
            f"grep -v {' '.join(f'-e {word!r}' for word in ours)} | sed -E 's/[0-9a-f]{{16,}}/ID/g'"
        )
        return {host: sorted(line.strip() for line in on(host, script).splitlines()) for host in NAMES}

    def trainer(self, host: str, run: str) -> int | None:
        """The pid of the rank's process, as its heartbeat names it."""
        rank = NAMES.index(host)
        text = on(host, f"cat {BASE}/runs/{run}/heartbeat-rank{rank}.json", check=False)
        try:
            pid = int(json.loads(text)["pid"])
        except (ValueError, KeyError, TypeError):
            return None
        # After a restart of the host the number may be another process's.
        return pid if "base_train" in on(host, f"cat /proc/{pid}/cmdline 2>/dev/null", check=False) else None

    def step(self, host: str, run: str) -> int:
        """The step that the rank has come to; -1 before its first."""
        rank = NAMES.index(host)
        line = on(host, f'grep \'"kind": *"step"\' {BASE}/runs/{run}/metrics-rank{rank}.jsonl | tail -n 1', check=False)
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            return -1

    def has_saved(self, host: str, run: str, step: int) -> bool:
        return bool(on(host, f"ls {BASE}/runs/{run}/base_checkpoints/{run}/meta_{step:06d}.json", check=False).strip())

    def weights(self, host: str, run: str, step: int) -> tuple[str, str]:
        """The digest of a checkpoint's weights and optimizer state, and the matrix libraries with which it was made."""
        # A run folder has its checkpoints below the run's name.
        place = f"{BASE}/runs/{run}/base_checkpoints/{run}"
        digest, dummy, routes = (
            on(host, f"{VENV}/bin/python /opt/digest.py {place} '*_{step:06d}*.pt'").strip().partition(" ")
        )
        return digest, routes
