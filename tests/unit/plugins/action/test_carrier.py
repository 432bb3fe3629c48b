# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which Python of a host a verb is sent to, and what is taken of its answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ansible_collections.nanochat.ddp.plugins.plugin_utils import _wheels
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import trainer
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import (
    FOUND,
    MARK,
    Call,
    answer_in,
    discovered,
    python_of,
)

ACTION: Any = SimpleNamespace(_templar=SimpleNamespace(template=lambda value: value))


@pytest.mark.parametrize(("named", "found"), [("/opt/python", "/usr/bin/other"), ("auto_silent", "/opt/python")])
def test_the_python_of_the_inventory_or_of_ansible_is_taken(named, found):
    facts = {"discovered_interpreter_python": found}
    assert python_of(ACTION, {"ansible_python_interpreter": named, "ansible_facts": facts}) == ["/opt/python"]


def test_before_ansible_has_looked_it_is_the_one_that_ansible_will_find(tmp_path):
    for name in ("python3", "python3.11", "python3.9"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    # pyenv has a shim for every version that any of its environments has.
    (tmp_path / "python3.12").write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    (tmp_path / "python3.12").chmod(0o755)

    def told(*names: str) -> subprocess.CompletedProcess[str]:
        argv = [*python_of(ACTION, {"ansible_interpreter_python_fallback": names}), "-I", "-"]
        return subprocess.run(
            ["/bin/sh", *argv[1:]], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )

    done = told("python3.13", "python3.12", "python3.11", "python3")
    assert done.stdout == f"{FOUND}{tmp_path}/python3.11\npython3.11 -I -\n"
    assert told("python3.13").returncode == 127


@pytest.mark.parametrize(
    ("line", "delegate", "taken"),
    [
        ("/usr/bin/python3.11", None, True),
        ("/usr/bin/python3.11", "other", False),
        ("x", None, False),
        (None, None, False),
    ],
)
def test_the_modules_of_ansible_take_the_python_that_was_found(line, delegate, taken):
    action: Any = SimpleNamespace(_task=SimpleNamespace(delegate_to=delegate))
    facts = {"ansible_facts": {"discovered_interpreter_python": "/usr/bin/python3.11"}}
    assert discovered(action, ["a motto", *([FOUND + line] if line else [])]) == (facts if taken else {})


@pytest.mark.parametrize(
    "key",
    [
        "add_host",
        "add_group",
        "ansible_facts",
        "ansible_playbook_python",
        "_ansible_no_log",
        "show",
        "terminal",
        "over",
    ],
)
def test_a_hosts_answer_gives_ansible_no_orders(key):
    told = json.dumps({"state": "running", key: {"name": "elsewhere"}})
    assert answer_in(["a motto", MARK + told]) == {"changed": False, "state": "running"}


THIS = {"ansible_python_interpreter": sys.executable}


class Host:
    """An action whose host is this machine."""

    def __init__(self, told: str = "") -> None:
        self.told = told
        self._connection = SimpleNamespace(has_pipelining=True, ansible_name="jail")
        self._templar = ACTION._templar
        self._task = SimpleNamespace(
            check_mode=False, delegate_to=None, environment=[{"HOME": "/srv"}, {"LC_ALL": "C"}]
        )

    def _low_level_execute_command(self, command: str, in_data: bytes) -> dict[str, Any]:
        done = subprocess.run(["/bin/sh", "-c", command], input=in_data, capture_output=True, check=False)
        return {"rc": done.returncode, "stdout": self.told + done.stdout.decode(), "stderr": done.stderr.decode()}


@pytest.mark.parametrize("told", ["", "a motto\n", MARK + "{ torn\n"])
def test_a_verb_is_answered_whatever_else_is_printed(told):
    """Also with the environment of the task, by which the host expands paths."""
    host: Any = Host(told)
    answer = Call(host, THIS).ask("run_info", base_dir="~/none", run="d4")
    assert answer["run"]["run_dir"] == "/srv/none/runs/d4" and answer["run"]["state"] == "absent"


@pytest.mark.parametrize(
    ("params", "said"),
    [({"base_dir": "/", "run": "a b"}, "for example d4-trial"), ({"bass_dir": "/"}, "run_info: TypeError: run_info() got an unexpected")],
)  # fmt: skip
def test_a_verb_that_refuses_or_fails_does_so_in_a_sentence(params, said):
    host: Any = Host()
    told = Call(host, THIS).ask("run_info", **params)
    assert told["failed"] and said in told["msg"] and "\n" not in told["msg"]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/bin/false", "its Python ended without an answer: it says nothing"),
        ("/bin/cat", "its Python ended without an answer: .*"),
        ("/nosuch", "the interpreter /nosuch was not found: .*"),
    ],
)
def test_a_host_without_an_answer_is_told_of(python, said):
    host: Any = Host()
    told = Call(host, {"ansible_python_interpreter": python}).ask("run_info")
    assert told["failed"] and re.fullmatch(said, told["msg"])


def test_a_delegated_verb_runs_under_the_python_of_the_host_that_is_asked():
    host: Any = Host()
    host._task.delegate_to = "desktop"
    known = {"ansible_python_interpreter": "/nosuch", "hostvars": {"desktop": THIS}}
    assert Call(host, known).ask("run_info", base_dir="/none", run="d4")["run"]["state"] == "absent"


def test_a_connection_without_a_pipe_is_refused():
    host: Any = Host()
    host._connection.has_pipelining = False
    assert Call(host, THIS).ask("run_info")["msg"] == "the connection jail takes no program; use ssh"


TAGS = {"python": "3.11", "machine": "x86_64", "kind": "3.11-x86_64"}


@pytest.mark.parametrize("tags", [*({**TAGS, "kind": name} for name in ("..", "a/b", ".ssh", "a\n", 4)), {}, None])
def test_what_a_host_says_of_its_python_becomes_no_folder_unless_it_is_a_plain_name(tags, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_DDP_HOME", str(tmp_path))
    answer = {"failed": True, "lacks_packages": True, **({} if tags is None else {"tags": tags})}
    call: Any = SimpleNamespace(host="laptop", ask=lambda verb, **params: answer)
    told = trainer.trainer_venv(call, path="/venv", packages=["trainer"], wheels_dir="/base/wheels")
    assert told["msg"].startswith("laptop sent an invalid answer about its Python") and not list(tmp_path.iterdir())


def test_a_host_that_lacks_packages_gets_no_other_file_of_the_controller(tmp_path, monkeypatch):
    sent: list[tuple[str, str]] = []
    monkeypatch.setenv("NANOCHAT_DDP_HOME", str(tmp_path))
    monkeypatch.setattr(trainer, "bring_wheels", lambda *dummy: {"a.whl": ("0" * 64, 1), "b.whl": ("1" * 64, 1)})
    call: Any = SimpleNamespace(
        host="laptop",
        ask=lambda verb, **params: {"lacking": ["../../.ssh/id_ed25519", "a.whl", "/etc/passwd"]},
        action=SimpleNamespace(_transfer_file=lambda local, remote: sent.append((local, remote))),
    )
    assert trainer.bring_packages(call, {"lock": "", "wheels_dir": "/base/wheels"}, TAGS) is None
    assert sent == [(f"{tmp_path}/wheels/3.11-x86_64/a.whl", "/base/wheels/3.11-x86_64/a.whl")]


def test_uv_is_fetched_once_for_hosts_that_lack_it_at_the_same_time(tmp_path, monkeypatch):
    fetched = []

    def fetch(text, python, machine, folder):
        fetched.append(folder)
        time.sleep(0.5)
        with zipfile.ZipFile(folder / "uv.whl", "w") as wheel:
            wheel.writestr("uv.data/scripts/uv", "#!/bin/sh")

    monkeypatch.setattr(_wheels, "bring_wheels", fetch)
    with ThreadPoolExecutor() as hosts:
        brought = list(hosts.map(lambda _: _wheels.bring_uv(tmp_path, "x86_64").read_text(), range(3)))
    assert brought == ["#!/bin/sh"] * 3 and len(fetched) == 1


def test_a_host_that_cannot_run_the_uv_that_was_brought_is_told_of(monkeypatch):
    monkeypatch.setattr(trainer, "bring_uv", lambda *dummy: "uv")
    lacks = {"changed": False, "lacks_uv": "x86_64"}
    call: Any = SimpleNamespace(host="laptop", action=mock.Mock(), ask=lambda verb, **params: lacks)
    made = trainer.made_with_uv(call, {"path": "/base/venv"})
    assert made["failed"] and made["msg"].startswith("laptop: /base/uv-") and "noexec" in made["msg"]
