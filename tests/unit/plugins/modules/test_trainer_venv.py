# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""With pip played by the test; tests/integration has the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils import basic
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import interpreter, venv
from ansible_collections.nanochat.ddp.plugins.modules import trainer_venv

INTERPRETER = {
    "version": [3, 11, 2],
    "executable": "/usr/bin/python3.11",
    "machine": "x86_64",
    "venv": True,
    "ensurepip": True,
    "pip": True,
    "libc": ["glibc", "2.36"],
}


class Tools:
    """Scripted python, venv and pip of this host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.interpreter = dict(INTERPRETER)
        self.installed = {"torch": "2.13.0+cpu"}
        self.install = (0, "", "")
        self.damaged: list[str] = []
        self.argvs: list[list[str]] = []

    def run(self, module, argv, **dummy):
        self.argvs.append(argv)
        if interpreter.ASK_INTERPRETER in argv:
            return 0, json.dumps(self.interpreter), ""
        if "venv" in argv:
            (self.path / "bin").mkdir(parents=True)
            (self.path / "pyvenv.cfg").write_text("home = /usr/bin\n")
            return 0, "", ""
        if "install" in argv:
            return self.install
        if venv.ASK_PACKAGES in argv:
            found = {"packages": self.installed, "cuda": None, "damaged": self.damaged, "python": "3.11"}
            return 0, json.dumps(found), ""
        return 0, "3.11\n", ""

    @property
    def installs(self) -> list[list[str]]:
        return [argv for argv in self.argvs if "install" in argv]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    found = Tools(tmp_path / "venv")

    def run_command(self, argv, **more):
        return found.run(self, argv, **more)

    monkeypatch.setattr(basic.AnsibleModule, "run_command", run_command)
    monkeypatch.setattr(basic.AnsibleModule, "get_bin_path", lambda self, name, *dummy: f"/usr/bin/{name}")
    monkeypatch.setattr(venv, "VENV_BYTES", 0)
    return found


@pytest.fixture
def make(run_module, tools):
    def run(_check_mode=False, **options):
        given = {"path": str(tools.path), "host": "worker", "requirements": ["torch==2.13.0"], "torch_index": "default"}
        return run_module(trainer_venv, _check_mode=_check_mode, **{**given, **options})

    return run


def test_makes_the_environment_and_says_what_it_holds(make, tools):
    result = make()

    assert result["changed"]
    assert result["python"] == f"{tools.path}/bin/python"
    assert (result["torch"], result["torch_is_cpu_build"]) == ("2.13.0+cpu", True)
    assert result["tags"] == {"python": "3.11", "machine": "x86_64", "libc": "glibc-2.36", "kind": "3.11-x86_64"}
    assert result["diff"] == {"before": "", "after": "torch==2.13.0\n"}
    assert tools.installs[0][:3] == [f"{tools.path}/bin/python", "-m", "pip"]


def test_check_mode_says_what_would_be_installed(make, tools):
    checked = make(_check_mode=True)

    assert checked["changed"] and checked["install"] == ["torch==2.13.0"]
    assert not tools.path.exists() and tools.installs == []
    assert checked["diff"] == make()["diff"]


def test_second_run_changes_nothing(make, tools):
    first = make()
    second = make()

    assert not second["changed"] and second["install"] == []
    assert len(tools.installs) == 1
    assert second["packages"] == first["packages"]


def test_other_requirements_are_installed_into_it(make, tools):
    make()
    tools.installed = {"torch": "2.14.0"}

    result = make(requirements=["torch==2.14.0"])

    assert result["changed"]
    assert result["diff"] == {"before": "torch==2.13.0\n", "after": "torch==2.14.0\n"}
    assert sum("venv" in argv for argv in tools.argvs) == 1


def test_environment_left_half_built_is_built_again(make, tools):
    tools.install = (1, "", "ERROR: Connection reset by peer")
    assert make()["failed"]
    (tools.path / "leftover").write_text("")
    tools.install = (0, "", "")

    assert make()["changed"]
    assert not (tools.path / "leftover").exists()
    assert not make()["changed"]


def test_unreachable_index_has_its_own_reason(make, tools):
    tools.install = (1, "", "NewConnectionError\nERROR: No matching distribution found for torch==2.13.0")

    result = make()

    assert result["failed"] and result["reason"] == "network"
    assert result["msg"].startswith(f"worker: the packages could not be installed in {tools.path}: no package index")
    assert result["tags"]["kind"] == "3.11-x86_64"


def test_environment_of_somebody_else_is_used_but_not_changed(make, tools):
    (tools.path / "bin").mkdir(parents=True)
    (tools.path / "pyvenv.cfg").write_text("home = /usr/bin\n")

    assert not make()["changed"]
    refused = make(requirements=["torch==2.14.0"])

    assert refused["failed"] and "this collection did not create" in refused["msg"]
    assert "lacks torch==2.14.0" in refused["msg"]
    assert tools.installs == []
    assert [entry.name for entry in tools.path.parent.iterdir()] == ["venv"], (
        "it may lie where nothing can be put beside it"
    )


def test_folder_that_is_no_environment_is_left_alone(make, tools):
    tools.path.mkdir()
    (tools.path / "thesis.tex").write_text("")

    for result in (make(), make(state="absent")):
        assert result["failed"] and result["msg"].startswith(f"worker: {tools.path} ")
    assert (tools.path / "thesis.tex").exists()


def test_python_without_ensurepip_names_the_package(make, tools, monkeypatch):
    tools.interpreter.update(ensurepip=False, pip=False)
    monkeypatch.setattr(venv, "install_hint", lambda what, minor="": f"sudo apt install python{minor}-{what}")

    result = make()

    assert result["failed"] and result["reason"] == "venv"
    assert "lacks ensurepip" in result["msg"] and "sudo apt install python3.11-venv" in result["msg"]


def test_pip_of_a_wheel_stands_in_for_ensurepip(make, tools, tmp_path):
    tools.interpreter.update(ensurepip=False, pip=False)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/pip-25.0-py3-none-any.whl").write_bytes(b"")

    make(wheels_dir=str(tmp_path / "wheels"), offline=True)

    assert tools.installs[0][:4] == [
        "/usr/bin/python3.11",
        f"{tmp_path}/wheels/pip-25.0-py3-none-any.whl/pip",
        "--python",
        f"{tools.path}/bin/python",
    ]
    assert "--no-index" in tools.installs[0]


def test_offline_without_wheels_asks_for_them(make, tools, tmp_path):
    result = make(wheels_dir=str(tmp_path / "wheels"), offline=True)

    assert result["failed"] and result["reason"] == "network"
    assert f"the wheel folder {tmp_path}/wheels does not exist" in result["msg"]


def test_absent_removes_what_was_made(make, tools):
    make()

    would = make(_check_mode=True, state="absent")
    assert tools.path.exists()
    done = make(state="absent")
    again = make(state="absent")

    assert [one["changed"] for one in (would, done, again)] == [True, True, False]
    assert not tools.path.exists() and not tools.path.with_suffix(".lock").exists()


def test_a_venv_that_was_changed_by_hand_heals(make, tools):
    make()
    tools.installed = {"torch": None}
    assert make(_check_mode=True)["changed"]
    healed = tools.installed = {"torch": "2.13.0+cpu"}
    tools.argvs.clear()
    assert not make()["changed"]

    tools.installed = {"torch": "2.12.0"}
    with_other = make(_check_mode=True)
    assert with_other["changed"] and with_other["install"] == ["torch==2.13.0"]
    tools.installed = healed
    tools.damaged = ["torch/__init__.py"]
    tools.argvs.clear()
    assert make()["changed"]
    assert any("venv" in argv for argv in tools.argvs)  # made from nothing


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_like_somebody_else_s(make, tools, monkeypatch, state):
    make()
    tools.damaged = ["torch/__init__.py"]

    def interrupted(path, *dummy, **more):
        if not more.get("ignore_errors"):
            (Path(path) / "pyvenv.cfg").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(venv.shutil, "rmtree", interrupted)
        make(state=state)
    tools.damaged = []
    assert make()["changed"]
    assert not make()["changed"]
    assert not Path(f"{tools.path}.trash").exists() or make(state="absent")["changed"]


def test_a_venv_is_not_changed_under_a_run_that_uses_it(make, tools, monkeypatch):
    make()
    argv = (f"{tools.path}/bin/python", "-m", "torch.distributed.run")
    one = processes.Process(pid=7, ppid=1, uid=0, start=1, state="S", argv=argv, name="python", marker="x")
    monkeypatch.setattr(processes, "processes", lambda: {7: one})
    assert not make()["changed"]
    for options in ({"requirements": ["torch==2.14.0"]}, {"state": "absent"}):
        failed = make(**options)
        assert (failed["failed"], failed["reason"]) == (True, "in-use")
        assert "process 7" in failed["msg"]
    assert (tools.path / venv.STAMP).exists()


def test_offline_packages_that_were_handed_on_are_found_again(make, tools, tmp_path):
    wheels = tmp_path / "wheels"
    (wheels / "3.11-x86_64").mkdir(parents=True)
    make(offline=True, wheels_dir=str(wheels))
    assert str(wheels / "3.11-x86_64") in tools.installs[-1]
    tools.install = (1, "", "ERROR: No matching distribution found for torch==2.14.0")
    failed = make(offline=True, wheels_dir=str(wheels), requirements=["torch==2.14.0"])
    assert failed["reason"] == "wheels"


def test_an_environment_is_removed_without_a_python_that_could_make_one(make, tools, monkeypatch):
    make()
    monkeypatch.setattr(basic.AnsibleModule, "get_bin_path", lambda self, name, *dummy: None)
    assert make(state="absent")["changed"]
    assert not tools.path.exists()


def test_an_environment_behind_a_link_is_made_again_where_the_link_leads(make, tools, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "venv").symlink_to(tmp_path / "large")
    make()
    (tmp_path / "large" / venv.STAMP).write_text("damaged")
    (tmp_path / "large" / venv.MARK).touch()
    done = make()
    assert (done["changed"], (tmp_path / "venv").is_symlink()) == (True, True)
    assert (tmp_path / "large" / venv.STAMP).exists() and make()["changed"] is False
