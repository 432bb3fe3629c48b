# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""More hosts than forks: all are followed at the same time, and nobody is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, until
from ansible_collections.nanochat.ddp.tests.integration.stage import WATCH, Stage, ansible_processes

HOSTS = 4
ALL = range(HOSTS)
LONG = 1000  # steps that no test waits for


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, HOSTS)


class Following:
    """A playbook that runs in the background, and its output so far."""

    def __init__(self, stage: Stage, play: list | str, forks: int, **more: str) -> None:
        self.path = stage.folder / "told"
        argv, environment = stage.argv(play, "--forks", str(forks)), stage.environment(PYTHONUNBUFFERED="1", **more)
        with self.path.open("w") as screen:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdout=screen, stderr=screen, start_new_session=True
            )

    @property
    def told(self) -> str:
        return self.path.read_text()

    def interrupt(self) -> None:
        """Ansible itself hangs now and then when it is interrupted while a worker reports; people press twice."""
        while self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)


@pytest.fixture
def following(stage: Stage) -> Iterator[Callable[..., Following]]:
    started: list[Following] = []

    def start(play: list | str, forks: int, **more: str) -> Following:
        started.append(Following(stage, play, forks, **more))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


@pytest.fixture
def watching(stage: Stage, ranks: Callable[..., None], following: Callable[..., Following]) -> Following:
    """The playbook itself, two processes of Ansible's, and one more for each of the other hosts."""
    ranks(steps=LONG, of=ALL)
    started = following(WATCH, forks=2)
    until(lambda: "step " in started.told and len(ansible_processes(stage)) == 1 + HOSTS)
    return started


def test_a_crash_beyond_the_forks_ends_the_watching_with_a_verdict_on_every_host(
    stage: Stage, ranks: Callable[..., None]
) -> None:
    ranks(steps=LONG, of=[0, 1, 2])
    ranks("--fail-at", "3", of=[3])
    told = stage.play(WATCH, "--forks", "1", code=2)
    assert "The run d4 on node4 crashed with code 1, 3 of 6 steps made: RuntimeError" in told
    for name in ("node1", "node2", "node3"):
        assert f"The run d4 on {name} still runs and waits for node4, which crashed" in told


def test_the_display_counts_hosts_beyond_the_forks(stage: Stage, ranks: Callable[..., None]) -> None:
    ranks(steps=40, of=[0, 1, 2])
    ranks("--seconds", "1.2", steps=20, of=[3])
    told = stage.play(WATCH, "--forks", "1")
    # Only node1 has a process of Ansible's own.
    assert re.search(r"step \d+/\d+.*  waited node1 .*, node4 30 %", told), told
    assert re.search(r"node4 +3 +finished +20/20", told)


def test_a_host_that_does_not_answer_holds_up_nobody(
    stage: Stage, ranks: Callable[..., None], following: Callable[..., Following]
) -> None:
    down = stage.folder / "down"
    down.touch()
    flaky = stage.flaky("node3", down)
    ranks(steps=LONG, of=ALL)
    watching = following(WATCH, forks=1, **flaky)
    until(lambda: "node3 does not answer" in watching.told and "step " in watching.told)
    down.unlink()
    seen = len(watching.told)
    until(lambda: any("step " in line and "node3 does" not in line for line in watching.told[seen:].splitlines()))


def test_a_host_that_only_a_module_can_ask_is_followed_later_and_told_of(
    stage: Stage, ranks: Callable[..., None]
) -> None:
    flaky = stage.flaky("node3", Path("/nowhere"), "    has_pipelining = False\n")
    ranks(of=ALL)
    told = stage.play(WATCH, "--forks", "1", **flaky)
    assert "node3 is followed only after others have ended: it can be asked by a module only" in stage.errors
    assert stage.errors.count("forks = 4 (or once: --forks 4)") == 1
    for name in stage.hosts:
        assert re.search(rf"{name} +\d +finished +6/6", told), told


ASKED = """
DOCUMENTATION = '''
name: asked
short_description: local, and writes down what it was told
description: local, and writes down what it was told
extends_documentation_fragment: [connection_pipelining]
options:
  host: {description: where, vars: [{name: inventory_hostname}, {name: ansible_host}]}
  port: {description: where, type: int, vars: [{name: ansible_port}], keyword: [{name: port}]}
  remote_user: {description: who, vars: [{name: ansible_user}], keyword: [{name: remote_user}], cli: [{name: user}]}
  password: {description: secret, vars: [{name: ansible_password}]}
  timeout: {description: seconds, type: int, default: 1, cli: [{name: timeout}]}
'''
import pathlib
from ansible.plugins.connection.local import Connection as Local
class Connection(Local):
    transport = "asked"
    def exec_command(self, *args, **kwargs):
        told = [str(self.get_option(name)) for name in ("host", "port", "remote_user", "password", "timeout")]
        pathlib.Path(FOLDER, self.get_option("host")).write_text(" ".join(told))
        return super().exec_command(*args, **kwargs)
"""


def test_connections_are_those_that_ansible_would_make(stage: Stage, ranks: Callable[..., None]) -> None:
    written = stage.folder / "written"
    written.mkdir()
    asked = stage.plugin("ANSIBLE_CONNECTION_PLUGINS", "asked", ASKED.replace("FOLDER", repr(str(written))))
    (stage.folder / "secret").write_text("common")
    del stage.variables["ansible_connection"]
    stage.hosts["node1"]["ansible_port"] = 22
    stage.hosts["node2"] |= {"ansible_host": "address2", "ansible_port": "{{ 2000 + rank }}", "ansible_user": "her"}
    stage.hosts["node3"]["ansible_password"] = "own"
    ranks(of=ALL)
    words = ("-c", "asked", "-u", "me", "-T", "77", "--connection-password-file", str(stage.folder / "secret"))
    told = {}
    for forks in ("1", "4"):
        stage.play(WATCH, *words, "--forks", forks, **asked)
        told[forks] = [(written / name).read_text() for name in ("node1", "address2", "node3", "node4")]
    assert told["1"] == told["4"]
    assert told["1"][1:] == ["address2 2001 her common 77", "node3 None me own 77", "node4 None me common 77"]


def test_a_controller_that_is_killed_leaves_nobody_behind(stage: Stage, watching: Following) -> None:
    watching.process.kill()
    watching.process.wait()
    until(lambda: not ansible_processes(stage), 60)


def test_an_interrupted_watching_leaves_nobody_behind(stage: Stage, watching: Following) -> None:
    watching.interrupt()
    until(lambda: not ansible_processes(stage))
    assert watching.process.returncode != 0 and "Training continues in the background" in watching.told
    found = json.loads(stage.play("nanochat.ddp.status", "-e", "ddp_json=true"))
    assert {run["state"] for run in found["hosts"].values()} == {"running"}
