"""Helpers for tests of a scenario's hosts: type commands as a user, look at a run, and act on a host as its owner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Ask until the answer is true; the answer."""
    until = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < until, f"{what} did not come true within {seconds} s"
        time.sleep(0.2)


class Lab:
    """The hosts of the scenario that runs, through the commands of a user and of the hosts' owners."""

    def __init__(self) -> None:
        self.scenario = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
        # For files on the controller that a test reads.
        self.kept = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])

    def play(self, *arguments: str, playbook: str = "train", code: int = 0, stdout_only: bool = False) -> str:
        """Play one of the collection's playbooks, with the display that its users see; what it printed, without colours."""
        command = ["ansible-playbook", f"nanochat.ddp.{playbook}", "-i", str(self.scenario / "inventory"), *arguments]
        done = subprocess.run(
            command,
            env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "nanochat.ddp.story", "ANSIBLE_NOCOLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        said = ANSI.sub("", done.stdout)
        print(f"$ {' '.join(command)}\n{said}{done.stderr}")
        assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}"
        assert "Traceback" not in said + done.stderr
        return said if stdout_only else said + done.stderr

    def status(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """The JSON of the playbook status about every host."""
        said = self.play("-e", "ddp_json=true", *arguments, playbook="status", stdout_only=True)
        return json.loads(said)["hosts"]

    def states(self, *arguments: str) -> dict[str, str]:
        return {host: run["state"] for host, run in self.status(*arguments).items()}

    def on(self, host: str, script: str, user: str = "root", code: int = 0) -> str:
        """Run a shell script on a host, not by way of ssh."""
        name = f"ddp-{self.scenario.name}-{host}"
        done = subprocess.run(
            ["podman", "exec", "--user", user, name, "bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{script} on {host} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
