# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""With a program in place of uv; tests/integration has the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer import venv
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.uv import VenvError
from ansible_collections.nanochat.ddp.plugins.module_utils._trainer.venv import remove_venv, trainer_venv
from ansible_collections.nanochat.ddp.tests.unit.plugins.stand_in_uv import Uv, tag

TORCH = {"lock": "torch==2.13.0+cpu\ntiny==1.0\n", "digest": "one", "pins": {"torch": ["2.13.0"]}}
NEWER = {"lock": "torch==2.14.0+cpu\n", "digest": "two", "pins": {"torch": ["2.14.0"]}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "venv"


@pytest.fixture
def uv(path, monkeypatch):
    monkeypatch.setattr(venv, "VENV_BYTES", 0)
    # The Python of the tests stands for the host's, whichever it is.
    monkeypatch.setattr(venv, "OLDEST_PYTHON", (3, 9))
    monkeypatch.setattr(venv, "answers", lambda *asked: False)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return Uv(Path(venv.uv_beside(str(path))))


@pytest.fixture
def make(call, path, uv):
    def run(_check_mode=False, **options):
        return call(trainer_venv, _check_mode=_check_mode, **{"path": str(path), "host": "worker", **TORCH, **options})

    return run


def test_makes_the_environment_and_says_what_it_holds(make, uv, path):
    result = make()

    assert result["changed"] and result["packages"] == {"torch": "2.13.0+cpu"}
    assert result["tags"] == {"python": tag().split("-")[0], "machine": os.uname().machine, "kind": tag()}
    assert result["diff"] == {"before": "", "after": "torch==2.13.0+cpu\n"}
    (call,) = uv.installs
    assert {"--require-hashes", "--no-build"} <= set(call["argv"])
    # Exactly this build: "==2.13.0" would also be met by 2.13.0+cpu, whose digests are in another lock.
    assert (path / "requirements.lock").read_text().startswith("torch===2.13.0+cpu\n")
    assert call["environ"]["UV_PYTHON_DOWNLOADS"] == "never" and sys.executable in uv.calls[0]["argv"]
    assert not Path(f"{path}.cache").exists()


def test_check_mode_says_what_would_be_installed(make, uv, path):
    checked = make(_check_mode=True)

    assert checked["changed"] and checked["diff"] == {"before": "", "after": "torch==2.13.0\n"}
    assert not path.exists() and uv.calls == []


def test_another_lock_is_installed_into_it(make, uv, path):
    first = make()
    again = make()
    assert not again["changed"] and again["packages"] == first["packages"] and len(uv.installs) == 1
    (path / "leftover").write_text("")
    result = make(**NEWER)

    assert result["changed"] and result["packages"] == {"torch": "2.14.0+cpu"}
    assert result["diff"] == {"before": "torch==2.13.0+cpu\n", "after": "torch==2.14.0+cpu\n"}
    assert (path / "leftover").exists() and len(uv.installs) == 2


WHO = "worker: the packages could not be installed in "


@pytest.mark.parametrize(
    ("words", "lacks_packages", "sentence"),
    [
        (
            "error: Request failed after 1 retry\n  cause: Failed to fetch: http://x/torch/\n  cause: Connection refused (os error 111)",
            True,
            "no package index answers there (Request failed after 1 retry: Connection refused (os error 111))",
        ),
        (
            "error: No solution found\n  cause: Because there is no version of torch==2.13.0+cpu and you require it",
            True,
            # field_37: a build for CUDA is never taken without a word.
            "or accept the CUDA build with `ddp_torch: 2.13.0+cuda`: about 3.0 GB to download and 8.0 GB of disk",
        ),
        (
            "error: No solution found\n  cause: Because there is no version of tiny==1.0 and you require tiny==1.0",
            False,
            "uv said: No solution found: Because there is no version of tiny==1.0",
        ),
        (
            "error: x\n  cause: invalid peer certificate: UnknownIssuer",
            True,
            "no package index answers there (x: invalid",
        ),
        ("error: x\n  cause: No space left on device (os error 28)", False, "uv said: x: No space left on device"),
        (
            "error: Failed to download `torch`\n  cause: Hash mismatch for `torch`",
            False,
            "uv said: Failed to download `torch`: Hash mismatch for `torch`",
        ),
        ("something else", False, "uv said: something else"),
    ],
)
def test_field_37_uv_s_words_become_one_sentence(make, uv, path, words, lacks_packages, sentence):
    uv.fail(words)

    result = make()

    assert result["failed"] and result["lacks_packages"] is lacks_packages and result["tags"]["kind"] == tag()
    assert result["msg"].startswith(f"{WHO}{path}: ") and sentence in result["msg"]
    assert "\n" not in result["msg"]


def test_environment_of_somebody_else_is_used_but_not_changed(make, uv, path):
    make()
    (path / venv.VENV_STAMP).unlink()
    before = len(uv.calls)

    assert not make()["changed"]
    refused = make(**NEWER)

    assert refused["failed"] and "this collection did not create" in refused["msg"]
    assert "lacks torch==2.14.0" in refused["msg"]
    assert len(uv.calls) == before and not remove_venv(str(path), "worker", False) and path.exists()


def test_folder_that_is_no_environment_is_left_alone(make, path):
    path.mkdir()
    (path / "thesis.tex").write_text("")

    result = make()
    assert result["failed"] and result["msg"].startswith(f"worker: {path} ")
    assert not remove_venv(str(path), "worker", False)
    assert (path / "thesis.tex").exists()


def test_what_pip_is_configured_with_is_handed_to_uv(make, uv, tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nextra-index-url =\n    https://one.example/simple\n    https://two.example/a\n"
        f"cert = {config}\nproxy = http://proxy.example:3128\n[install]\ntrusted-host = one.example\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/wheels https://links.example")
    make()
    seen = uv.installs[0]["environ"]
    assert seen["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert seen["UV_INDEX"].split() == ["https://one.example/simple", "https://two.example/a"]
    assert seen["UV_FIND_LINKS"] == "/opt/wheels,https://links.example"
    assert seen["UV_INSECURE_HOST"] == "one.example" and seen["SSL_CERT_FILE"] == str(config)
    assert seen["HTTPS_PROXY"] == "http://proxy.example:3128" and "UV_NO_INDEX" not in seen

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example")
    make(**NEWER)
    seen = uv.installs[1]["environ"]
    assert seen["UV_NO_INDEX"] == "1" and "UV_INDEX" not in seen
    assert seen["UV_DEFAULT_INDEX"] == "https://own.example"  # what the user set for uv stands


@pytest.mark.parametrize(("lock", "asked"), [(TORCH, venv.CPU_INDEX), ({**TORCH, "lock": "torch==2.13.0\n"}, "")])
def test_torch_s_index_is_added_for_a_cpu_build_where_it_answers(make, uv, monkeypatch, lock, asked):
    monkeypatch.setattr(venv, "answers", lambda *asked: True)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    make(**lock)
    assert uv.installs[0]["environ"].get("UV_INDEX", "") == asked


def test_what_was_made_is_removed(make, uv, path, tmp_path):
    make()
    assert remove_venv(str(path), "worker", True) and path.exists()
    assert remove_venv(str(path), "worker", False) and not remove_venv(str(path), "worker", False)
    assert {one.name for one in tmp_path.iterdir()} <= {"uv-calls", "venv.lock"}


def test_a_venv_that_was_changed_by_hand_heals(make, path, tmp_path):
    # A link to another disk stays one.
    (tmp_path / "big-disk").mkdir()
    path.symlink_to(tmp_path / "big-disk")
    make()
    (package,) = path.glob("lib/*/site-packages/torch-*")
    package.rename(package.with_name("torch-2.12.0.dist-info"))
    assert make(_check_mode=True)["changed"]
    assert make()["changed"] and make()["packages"]["torch"] == "2.13.0+cpu"
    (path / "bin/python").unlink()
    assert make()["changed"]
    assert path.is_symlink() and (tmp_path / "big-disk" / venv.VENV_STAMP).exists()


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_removal_that_is_interrupted_leaves_nothing_that_looks_like_somebody_else_s(make, path, monkeypatch, state):
    make()
    (path / "bin/python").unlink()

    def interrupted(path, *dummy, **more):
        if not more.get("ignore_errors"):
            (Path(path) / "pyvenv.cfg").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(venv.shutil, "rmtree", interrupted)
        remove_venv(str(path), "worker", False) if state == "absent" else make()
    assert make()["changed"]
    assert not make()["changed"]
    assert not Path(f"{path}.trash").exists() or remove_venv(str(path), "worker", False)


def test_a_venv_is_not_changed_under_a_run_that_uses_it(make, path, monkeypatch):
    make()
    argv = (f"{path}/bin/python", "-m", "torch.distributed.run")
    one = processes.Process(pid=7, ppid=1, uid=0, start=1, state="S", argv=argv, name="python", marker="x")
    monkeypatch.setattr(processes, "processes", lambda: {7: one})
    assert not make()["changed"]
    for check in (True, False):
        failed = make(_check_mode=check, **NEWER)
        assert failed["failed"] and "process 7" in failed["msg"]
    with pytest.raises(VenvError, match="process 7"):
        remove_venv(str(path), "worker", False)
    assert (path / venv.VENV_STAMP).exists()


def test_a_python_is_made_once_where_none_is_new_enough(make, uv, tmp_path, monkeypatch):
    monkeypatch.setattr(venv, "MADE_PYTHON", tag().split("-")[0])
    python = tmp_path / "python/current/bin/python3"

    assert make(_check_mode=True, python=str(python))["changed"] and not python.exists()
    assert make(python=str(python))["changed"] and python.exists()
    assert (tmp_path / "python/.made.json").exists()
    assert not make(python=str(python))["changed"]
    assert [call["argv"][:2] for call in uv.calls].count(["python", "install"]) == 1


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/nowhere/python3", "does not run as a Python"),
        ("/bin/echo", "does not run as a Python"),
        ("", "is Python 3.9, and the trainer needs 3.10"),
    ],
)
def test_a_python_that_cannot_serve_is_named(make, path, tmp_path, monkeypatch, python, why):
    monkeypatch.setattr(venv, "OLDEST_PYTHON", (3, 10))
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\necho "[3, 9]"\n')
    old.chmod(0o755)
    failed = make(python=python or str(old))
    assert failed["failed"] and f"worker: {python or old} {why}" in failed["msg"] and "ddp_python" in failed["msg"]
    assert not path.exists()


def test_no_room_is_said_before_anything_is_fetched(make, uv, monkeypatch):
    monkeypatch.setattr(venv, "VENV_BYTES", 10**18)
    failed = make()
    assert failed["failed"] and "free; change that, or give another folder" in failed["msg"] and uv.calls == []
