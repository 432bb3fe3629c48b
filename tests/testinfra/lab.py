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

    def __init__(self, display: str = "nanochat.ddp.story") -> None:
        self.scenario = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
        # For files on the controller that a test reads.
        self.kept = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"])
        self.env = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": display, "ANSIBLE_NOCOLOR": "1"}

    def argv(self, playbook: str, *arguments: str, **settings: Any) -> list[str]:
        """The command that plays one of the collection's playbooks."""
        given = ["-e", json.dumps(settings)] if settings else []
        return [
            "ansible-playbook",
            f"nanochat.ddp.{playbook}",
            "-i",
            str(self.scenario / "inventory"),
            *given,
            *arguments,
        ]

    def play(
        self, *arguments: str, playbook: str = "train", code: int = 0, stdout_only: bool = False, **settings: Any
    ) -> str:
        """Play one of the collection's playbooks, which must end with this code; what it printed, without colours."""
        command = self.argv(playbook, *arguments, **settings)
        done = subprocess.run(
            command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False
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

    def container(self, host: str) -> str:
        return f"ddp-{self.scenario.name}-{host}"

    def on(self, host: str, script: str, user: str = "root", code: int | None = 0) -> str:
        """Run a shell script on a host, past ssh and whatever fault is on the network; with any code if that is None."""
        done = subprocess.run(
            ["podman", "exec", "--user", user, self.container(host), "bash", "-c", script],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert code in (None, done.returncode), (
            f"{script} on {host} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done.stdout
