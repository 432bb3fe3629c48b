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

NETWORK = "ddp-campaign"
SUBNET = "10.89.79"
NAMES = ("desktop", "laptop")
USER = {"desktop": "lzw", "laptop": "xiaoxin"}
ADDRESS = {"desktop": f"{SUBNET}.11", "laptop": f"{SUBNET}.12"}
BASE = "/mnt/nanochat"
DISK_MEGABYTES = 400
VENV = "/opt/trainer-venv"
# Files of a checkpoint to one digest, whatever the order in which they were written.
DIGEST = """
import hashlib, pathlib, sys, torch
digest, routes = hashlib.sha256(), set()
def feed(name, value):
    if isinstance(value, torch.Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            if key == "route":
                routes.add(value[key])
            feed(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            feed(f"{name}.{number}", one)
    else:
        digest.update(f"{name}={value!r}".encode())
for path in sorted(pathlib.Path(sys.argv[1]).glob(sys.argv[2])):
    if path.suffix == ".pt":
        feed(path.name, torch.load(path, weights_only=True, map_location="cpu"))
print(digest.hexdigest()[:16], *sorted(routes))
"""


class HostError(Exception):
    """A host could not be brought into a state; that is a fault of this campaign, not of what it tries."""


def command(*argv: str, check: bool = True, seconds: float = 90.0) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds)
    if check and done.returncode != 0:
        raise HostError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def as_root(*argv: str) -> str:
    return command(*([] if os.getuid() == 0 else ["sudo", "-n"]), *argv)


def on(host: str, script: str, check: bool = True) -> str:
    """A shell script as root of the host, past ssh and past whatever fault is on its network."""
    return command("podman", "exec", f"{NETWORK}-{host}", "bash", "-c", script, check=check)


def until(what: str, true: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        if time.monotonic() > end:
            raise HostError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.2)


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
            "podman", "run", "-d", "--init", "--name", f"{NETWORK}-{host}", "--hostname", host,
            "--network", f"{NETWORK}:ip={ADDRESS[host]},interface_name=eth0", "--cap-add", "NET_ADMIN,NET_RAW,SYS_PTRACE,AUDIT_WRITE",
            "--volume", f"{disk}:{BASE}", self.image,
        )  # fmt: skip
        on(host, f"chown {USER[host]}: {BASE}")
        home = f"/home/{USER[host]}"
        on(
            host,
            f"mkdir -m 700 {home}/.ssh && echo '{self.key}' >{home}/.ssh/authorized_keys && chown -R {USER[host]}: {home}/.ssh",
        )
        if host == "desktop":  # the laptop's user has no sudo
            on(host, "ufw allow 22/tcp && ufw --force enable")

    def _write_inventory(self) -> None:
        (self.inventory / "group_vars").mkdir(parents=True)
        hosts = {
            host: {"ansible_host": ADDRESS[host], "ansible_user": USER[host], "ddp_base_dir": BASE} for host in NAMES
        }
        (self.inventory / "hosts.yml").write_text(json.dumps({"trainers": {"hosts": hosts}}), encoding="ascii")

    def settings(self, values: dict[str, Any]) -> None:
        (self.inventory / "group_vars" / "trainers.yml").write_text(json.dumps(values), encoding="ascii")

    def remove(self) -> None:
        command("podman", "rm", "-f", "-i", "-t", "1", *(f"{NETWORK}-{host}" for host in NAMES), check=False)
        command("podman", "network", "rm", "-f", NETWORK, check=False)
        for host in NAMES:
            disk = self.folder / f"disk-{host}"
            if disk.is_mount():
                as_root("umount", "-l", str(disk))

    # -- what is looked at

    def rulesets(self) -> dict[str, str]:
        """The firewall of each host without its counters."""
        plain = "sed 's/\\[[0-9]*:[0-9]*\\]//; /^#/d'"
        script = f"iptables-save | {plain}; ip6tables-save | {plain}; ufw status verbose || true"
        return {host: on(host, script) for host in NAMES}

    def processes(self) -> dict[str, list[str]]:
        """What runs on each host, without what only looks or waits for a user."""
        ours = ("ps -eo", "bash -c", "sshd", "sed s", "catatonit", "podman-init")
        script = f"ps -eo user:20,args --no-headers | grep -v {' '.join(f'-e {word!r}' for word in ours)} || true"
        return {host: sorted(line.strip() for line in on(host, script).splitlines()) for host in NAMES}

    def trainer(self, host: str, run: str) -> int | None:
        """The pid of the rank's process, as its heartbeat names it."""
        rank = NAMES.index(host)
        text = on(host, f"cat {BASE}/runs/{run}/heartbeat-rank{rank}.json", check=False)
        try:
            pid = int(json.loads(text)["pid"])
        except (ValueError, KeyError, TypeError):
            return None
        return pid if on(host, f"kill -0 {pid} 2>/dev/null && echo yes || true").strip() else None

    def weights(self, host: str, run: str, step: int) -> tuple[str, str]:
        """The digest of a checkpoint's weights and optimizer state, and the matrix library with which it was made."""
        (self.folder / "digest.py").write_text(DIGEST, encoding="ascii")
        command("podman", "cp", str(self.folder / "digest.py"), f"{NETWORK}-{host}:/tmp/digest.py")
        # A run folder has its checkpoints below the run's name.
        place = f"{BASE}/runs/{run}/base_checkpoints/{run}"
        digest, dummy, route = (
            on(host, f"{VENV}/bin/python /tmp/digest.py {place} '*_{step:06d}*'").strip().partition(" ")
        )
        return digest, route
