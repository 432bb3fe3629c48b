# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The display as a person sees it: small real playbooks, with and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FINDING = {
    "code": "slow-link",
    "severity": "warning",
    "host": "node1",
    "peer": "node2",
    "seen": "94 Mbit/s",
    "remedy": "use the cable",
}
# Modules and an action.
FOUND = """
from ansible.module_utils.basic import AnsibleModule
m = AnsibleModule(argument_spec=dict(findings=dict(type='list', elements='dict')))
m.exit_json(findings=m.params['findings'])
"""
PRINTS = """
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        Display().display(TEXT)
        return {}
"""


FLAKY = """
DOCUMENTATION = '''
name: flaky
short_description: local, unless a file says that the host is down
description: local, unless a file says that the host is down
extends_documentation_fragment: [connection_pipelining]
'''
import os
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local
class Connection(Local):
    transport = "flaky"
    def exec_command(self, *args, **kwargs):
        if os.path.exists(DOWN):
            raise AnsibleConnectionFailure("the cable is out")
        return super().exec_command(*args, **kwargs)
"""
WATCH: list[dict[str, Any]] = [{"roles": [{"role": "nanochat.ddp.watch", "watch_doctor": ""}]}]


class Screen(Stage):
    """Local nodes with a run, and playbooks on a terminal or without one."""

    def __init__(self, folder: Path, hosts: int = 2) -> None:
        super().__init__(folder, [f"node{rank + 1}" for rank in range(hosts)])
        for rank, known in enumerate(self.hosts.values()):
            known["rank"] = rank
        nodes = [
            {"host": name, "run_dir": str(self.run_dir(rank)), "rank": rank} for rank, name in enumerate(self.hosts)
        ]
        watch = "{{ watch | default(true) }}"
        self.variables = {
            "ddp_plan": {"run": "d4", "timeout_seconds": 60, "nodes": nodes},
            "ddp_controller": {"watch": watch, "results_dir": str(folder / "runs"), "fresh": False},
            "ddp_node": {
                "run_dir": "{{ ddp_base_dir }}/runs/d4",
                "base_dir": "{{ ddp_base_dir }}",
                "rank": "{{ rank | int }}",
            },
        }
        self.environment = {"PWD": str(folder), "LC_ALL": "C.UTF-8"}

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"node{rank + 1}" / "runs" / "d4"

    def role(self, name: str, tasks: list[dict[str, Any]]) -> None:
        path = self.folder / "roles" / name / "tasks"
        path.mkdir(parents=True)
        (path / "main.yml").write_text(json.dumps(tasks))

    def flaky(self, host: str, down: Path) -> dict[str, str]:
        """Connect to a host by a plugin that fails while a file exists; returns the environment in which Ansible finds it."""
        self.hosts[host]["ansible_connection"] = "flaky"
        return self.plugin("ANSIBLE_CONNECTION_PLUGINS", "flaky", FLAKY.replace("DOWN", repr(str(down))))

    def plugin(self, setting: str, name: str, text: str) -> dict[str, str]:
        """Write a plugin; returns the setting by which Ansible finds it."""
        folder = self.folder / setting.lower()
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        return {setting: str(folder)}

    def terminal(self, plays: list[dict[str, Any]] | str, *words: str, **more: str) -> str:
        """With one."""
        argv = self.argv(plays, *words)
        kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment = {**kept, **self.environment, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **more}
        child, descriptor = pty.fork()
        if child == 0:
            os.chdir(ROOT)
            os.execvpe(argv[0], argv, environment)
        seen, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([descriptor], [], [], 0.2)[0]:
                try:
                    data = os.read(descriptor, 65536)
                except OSError:
                    break
                if not data:
                    break
                seen += data
        os.close(descriptor)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, seen.decode()
        return seen.decode()


@pytest.fixture
def stage(tmp_path: Path) -> Screen:
    return Screen(tmp_path)


@pytest.fixture
def ranks(stage: Screen) -> Iterator[Callable[..., None]]:
    """`ranks(*words, steps=6)` starts stand-ins for the trainers of both hosts, which end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, steps: int = 6) -> None:
        for rank in (0, 1):
            folder = str(stage.run_dir(rank))
            argv = [
                sys.executable,
                fake_run.__file__,
                folder,
                f"--rank={rank}",
                f"--steps={steps}",
                "--seconds=0.4",
                *words,
            ]
            started.append(subprocess.Popen(argv))

    yield start
    for process in started:
        process.kill()
        process.wait()


def on_screen(stream: str) -> list[str]:
    """The lines that remain on a terminal, without those that were drawn over."""
    lines = [CODES.sub("", line.rpartition("\x1b[K")[2]).rstrip("\r") for line in stream.split("\n")]
    return [line for line in lines if line.strip()]


def task(name: str, module: str, options: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, module: options, **more}


def debug(text: str, **more: Any) -> dict[str, Any]:
    return task("Say", "ansible.builtin.debug", {"msg": text}, **more)


def set_fact(**facts: Any) -> dict[str, Any]:
    return task("Note", "ansible.builtin.set_fact", facts)


def test_steps_get_one_line_each_with_mark_time_and_changes(stage: Screen) -> None:
    stage.role("plan", [set_fact(a=1)])
    stage.role("tracker", [debug("never", when=False)])
    stage.role("preflight", [debug("rank 0: node1\nrank 1: node2", run_once=True)])
    copy = {"content": "x", "dest": f"{stage.folder}/{{{{ inventory_hostname }}}}.txt", "mode": "0600"}
    stage.role("launch", [task("Write", "ansible.builtin.copy", copy)])
    plays = [{"roles": ["plan", "preflight", "tracker", "launch"]}]
    lines = stage.play(plays).splitlines()
    assert re.fullmatch(r"ok plan +\d\.\d s", lines[0])
    assert lines[1:4] == ["preflight", "  rank 0: node1", "  rank 1: node2"]
    assert re.fullmatch(r"ok preflight +\d\.\d s", lines[4])
    assert re.fullmatch(r"ok launch +\d\.\d s   changed: node1 1, node2 1", lines[5])
    assert re.fullmatch(r"done in \d\.\d s; changed: node1 1, node2 1", lines[6])
    assert len(lines) == 7
    assert stage.play(plays).splitlines()[-1].endswith("changed: nothing")


def test_a_role_that_a_step_makes_use_of_is_no_step_of_its_own(stage: Screen) -> None:
    stage.role("data", [debug("handed on", run_once=True)])
    use = {"name": "data"}
    stage.role("trainer", [set_fact(a=1), task("Use", "ansible.builtin.include_role", use), set_fact(b=1)])
    stage.role("doctor", [debug("all is well", run_once=True)])
    stage.role("watch", [set_fact(a=1), task("Ask", "ansible.builtin.include_role", {"name": "doctor"})])
    lines = stage.play([{"roles": ["trainer", "watch"]}]).splitlines()
    words = [line.removeprefix("ok ").split()[0] for line in lines]
    assert words == ["trainer", "handed", "trainer", "watch", "doctor", "all", "doctor", "done"]


def test_a_terminal_gets_marks_and_colours_and_no_task_list(stage: Screen) -> None:
    stage.role("plan", [set_fact(a=1)])
    seen = stage.terminal([{"roles": ["plan"]}])
    assert on_screen(seen)[0].startswith("✔ plan")
    assert "\x1b[0;32m" in seen
    assert "TASK" not in seen
    plain = stage.terminal([{"roles": ["plan"]}], NO_COLOR="1")
    assert "\x1b[0;32m" not in plain


def test_findings_are_told_once_as_they_come(stage: Screen) -> None:
    library = stage.plugin("ANSIBLE_LIBRARY", "found", FOUND)
    found = [
        FINDING,
        {**FINDING, "seen": "node2 cannot connect to node1"},
        {**FINDING, "peer": "", "remedy": "Nothing to do.", "severity": "info"},
        {**FINDING, "peer": "", "host": "", "remedy": ""},
    ]
    told = stage.play([{"tasks": [task("Find", "found", {"findings": found})]}], **library).splitlines()
    assert told[:7] == [
        "warning slow-link  node1, node2: 94 Mbit/s",
        "  do: use the cable",
        "warning slow-link  node1, node2: node2 cannot connect to node1",
        "  do: use the cable",
        "note slow-link  node1: 94 Mbit/s",
        "  Nothing to do.",
        "warning slow-link  94 Mbit/s",
    ]


def test_errors_are_whole_with_host_and_task_and_the_same_is_said_shortly(stage: Screen) -> None:
    message = "Port 29500 is taken on {{ inventory_hostname }}.\nIt is held by pid 4242."
    stage.role("preflight", [task("Try the port", "ansible.builtin.fail", {"msg": message})])
    told = stage.play([{"roles": ["preflight"]}], code=2)
    assert "FAILED node1: Try the port\n    Port 29500 is taken on node1.\n    It is held by pid 4242.\n" in told
    assert "node2: Try the port" in told
    assert re.search(r"^FAILED preflight +\d\.\d s$", told, re.M)
    assert "failed on node1, node2 in" in told
    named = task(
        "Fail if it is taken", "ansible.builtin.fail", {"msg": "{{ inventory_hostname }}: port 29500 is taken."}
    )
    assert "FAILED node1: port 29500 is taken." in stage.play([{"tasks": [named]}], code=2).splitlines()
    alike = [{"tasks": [task("Fail", "ansible.builtin.fail", {"msg": "nothing goes"})]}]
    assert stage.play(alike, code=2).count("nothing goes") == 1


def test_what_fails_once_for_all_hosts_is_laid_at_no_host_s_door(stage: Screen) -> None:
    fail = task("Stop here", "ansible.builtin.fail", {"msg": "One of the ways is closed."}, run_once=True)
    told = stage.play([{"tasks": [fail]}], code=2).splitlines()
    assert told[0] == "FAILED One of the ways is closed."
    assert re.fullmatch(r"failed in \d\.\d s; changed: nothing", told[-1])
    argv = {"argv": ["sh", "-c", "exit 3"]}
    page = stage.play([{"tasks": [task("Make the page", "ansible.builtin.command", argv, run_once=True)]}], code=2)
    assert page.startswith("FAILED Make the page\n  non-zero return code")


def test_each_failure_is_told_in_its_own_words(tmp_path: Path) -> None:
    stage = Screen(tmp_path, 4)
    stage.hosts["node4"].update(ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
    said = {"argv": ["sh", "-c", "echo to out; echo to err >&2; exit 3"]}
    tasks = [
        task("Fail", "ansible.builtin.fail", {"msg": "never mind"}, ignore_errors=True),
        task("Run", "ansible.builtin.command", said, when="rank == 0"),
        task("Fail", "ansible.builtin.fail", {"msg": "no {{ item }}"}, loop=["a", "b"], when="rank == 1"),
        debug("{{ nothing_of_this_name }}", when="rank == 2"),
        task("Ping", "ansible.builtin.ping"),
    ]
    told = stage.play([{"tasks": tasks}], code=4)
    assert "never mind" not in told
    assert "non-zero return code" in told and "to err" in told and "to out" in told
    assert told.count("no a") == told.count("no b") == 1
    assert "'nothing_of_this_name' is undefined" in told and "play.yml:" in told
    assert "node4 cannot be reached: " in told and "Connection refused" in told and "do: check that it is on" in told
    assert "failed on node1, node2, node3, node4" in told


def test_check_mode_lists_what_would_change_and_diff_shows_it(stage: Screen) -> None:
    copy = {"content": "new\n", "dest": f"{stage.folder}/{{{{ inventory_hostname }}}}.txt", "mode": "0600"}
    stage.role("launch", [task("Write the file", "ansible.builtin.copy", copy)])
    told = stage.play([{"roles": ["launch"]}], "--check", "--diff")
    assert told.startswith("Check mode: nothing is changed.\n")
    assert "would change on node1: Write the file" in told
    assert "+new" in told
    assert "would change: node1 1, node2 1" in told
    assert not (stage.folder / "node1.txt").exists()


def prints(stage: Screen, text: str) -> dict[str, str]:
    """Write an action called `prints`, which shows a text through Ansible's display as some of ours do."""
    return stage.plugin("ANSIBLE_ACTION_PLUGINS", "prints", PRINTS.replace("TEXT", repr(text)))


def test_what_an_action_prints_falls_under_its_step(stage: Screen) -> None:
    actions = prints(stage, "\nthe plan\n  of two lines\n")
    stage.role("plan", [task("Plan", "prints", run_once=True)])
    lines = stage.play([{"roles": ["plan"]}], **actions).splitlines()
    assert lines[:3] == ["plan", "  the plan", "    of two lines"]
    screen = on_screen(stage.terminal([{"roles": ["plan"]}], **actions))
    assert screen[:3] == ["▸ plan", "  the plan", "    of two lines"]


def test_for_programs_nothing_but_the_document_is_printed(stage: Screen) -> None:
    actions = prints(stage, '{"a": 1}')
    stage.role("plan", [task("Plan", "prints", run_once=True)])
    assert json.loads(stage.play([{"roles": ["plan"]}], "-e", "ddp_json=true", **actions)) == {"a": 1}


def test_v_brings_ansibles_own_output_back_and_so_does_the_setting(stage: Screen) -> None:
    plays = [{"tasks": [debug("hello")]}]
    told = stage.play(plays, "-v")
    assert "TASK [Say]" in told and "PLAY RECAP" in told
    assert "TASK [Say]" in stage.play(plays, ANSIBLE_STDOUT_CALLBACK="default")


def test_no_matching_host_is_an_error_that_is_explained(stage: Screen) -> None:
    assert "have a group `trainers`" in stage.play([{"hosts": "nobody", "tasks": []}], code=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ddp_purge=runs",), "it must be run"),
        (("ddp_purge=run",), "-e ddp_purge=run -e ddp_run=NAME"),
        (("purge=true", "ddp_run=d4"), "-e ddp_purge=run -e ddp_run=NAME"),
    ],
)
def test_reset_does_not_guess_what_is_to_be_deleted(stage: Screen, words: tuple[str, ...], said: str) -> None:
    given = [part for word in words for part in ("-e", word)]
    told = stage.play("playbooks/reset.yml", *given, code=2, ANSIBLE_STDOUT_CALLBACK="default")
    assert said in told
    assert "TASK [Stop" not in told and "Find running sessions" not in told


def test_under_another_display_no_look_is_called_a_failure(stage: Screen, ranks: Callable[..., None]) -> None:
    ranks("--seconds", "0.5", steps=10)
    told = stage.play(WATCH, ANSIBLE_STDOUT_CALLBACK="default")
    assert "RETRYING" not in told and "FAILED" not in told
    assert re.search(r"^(starting.*|step \d+/10.*  loss .*)$", stage.errors, re.M), stage.errors
    assert re.findall(r"^ok: \[(node\d)\]$", told.partition("Watch the run")[2].partition("TASK")[0], re.M)


def test_on_a_terminal_a_watched_run_has_one_live_line(stage: Screen, ranks: Callable[..., None]) -> None:
    ranks(steps=20)
    seen = stage.terminal(WATCH)
    assert re.search("\x1b\\[K  █+░+  step [0-9]+/20  loss", seen)
    screen = on_screen(seen)
    assert not any("░" in line for line in screen)
    assert any(line.startswith("✔ watch") for line in screen)
    assert all(
        len(CODES.sub("", line).strip("\r")) < 100 for line in seen.split("\x1b[K") if "░" in line and "\n" not in line
    )


def test_on_a_terminal_a_long_task_shows_its_seconds(stage: Screen) -> None:
    stage.role("trainer", [task("Install", "ansible.builtin.command", {"argv": ["sleep", "4"]}, changed_when=False)])
    seen = stage.terminal([{"hosts": "node1", "roles": ["trainer"]}])
    assert re.search(r"trainer    Install  3 s", seen)
    assert on_screen(seen)[0].startswith("✔ trainer")


def test_without_watching_it_returns_with_the_first_step(stage: Screen, ranks: Callable[..., None]) -> None:
    ranks(steps=500)
    begun = time.monotonic()
    told = stage.play(WATCH, "-e", "watch=false")
    assert "started" in told
    assert time.monotonic() - begun < 30


def test_field_18_a_crash_is_told_with_its_error(stage: Screen, ranks: Callable[..., None]) -> None:
    ranks("--fail-at", "2")
    told = stage.play(WATCH, code=2)
    assert "The run d4 on node1 crashed with code 1, 2 of 6 steps made: RuntimeError: [enforce fail" in told
    assert "crashed" in told


def test_field_12_a_watched_run_is_followed_to_its_table_also_if_a_connection_breaks(
    stage: Screen, ranks: Callable[..., None]
) -> None:
    down = stage.folder / "down"
    flaky = stage.flaky("node2", down)
    ranks(steps=40)
    argv, environment = stage.argv(WATCH), {**os.environ, **stage.environment, **flaky}
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        told = ""
        for line in watching.stdout:
            told += line
            if "5.0 %, node2 30 %" in line and not down.exists() and "node2 does not answer" not in told:
                down.touch()
            if "node2 does not answer" in line:
                down.unlink(missing_ok=True)
    assert watching.returncode == 0, told
    assert "node2 does not answer" in told
    assert re.search(r"node2 +1 +finished +40/40", told)
    assert re.search(r"step \d+/40  loss \d\.\d+  5120 tok/s  waited node1 5\.0 %, node2 30 %", told)
    assert re.search(r"node1 +0 +finished +40/40 +2 +8\.0000 +\d\.\d+ +1\.\d+ +5120 +\d\.\d s \(5\.0 %\)", told)
    assert "weights identical on both ranks" in told
    assert "Ctrl-C stops watching; training continues" in told


def test_collect_compares_with_earlier_runs(stage: Screen) -> None:
    for run, place in (("d4", "node1/runs/d4"), ("d4-before", "results/d4-before/node1")):
        fake_run.write_history(stage.folder / place, fake_run.history(0, 1, 10, 1.7e9, 0.5, run), 0)
    more = ["-e", f"ddp_results_dir={stage.folder}/results", "-e", "ddp_run=d4", "-e", "compare=d4-before"]
    stage.play("nanochat.ddp.collect", *more)
    assert '"run":"d4-before"' in (stage.folder / "results/d4/report.html").read_text()
    told = stage.play("nanochat.ddp.collect", *more[:-1], "compare=nix", code=2)
    assert "There is no folder" in told
    assert "Check the run's name and that it was collected." in told


def test_on_a_narrow_terminal_advice_is_wrapped_between_words_and_commands_stay_whole(stage: Screen) -> None:
    advice = "The owner of this machine can open the port, for example with the command below, or " + "wait " * 20
    command = "ssh xiaoxin@192.168.1.11 'tail -F " + "/a/long/path" * 10 + "'"
    stage.role("network", [debug(advice, run_once=True), debug(command, run_once=True)])
    screen = [line.rstrip() for line in on_screen(stage.terminal([{"roles": ["network"]}]))]
    assert "  " + command in screen
    told = [line for line in screen[1:] if "ssh" not in line and "network" not in line]
    assert all(len(line) <= 100 for line in told) and " ".join(" ".join(told).split()).startswith(advice.strip())
