# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Code of ours as a program that needs nothing but Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import deployment
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import bare, host_code
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import setup_look
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.module_utils._run import polling, state
from ansible_collections.nanochat.ddp.plugins.module_utils._session import runner
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent import verbs


def answer(verb, **params):
    """The answer of a verb's program, from a Python with only its standard library."""
    told = ("mark ", verb.__module__, verb.__name__, params, {})
    text = host_code.program(bare.__name__, "answer", *told, needs=(verb.__module__,))
    done = subprocess.run([sys.executable, "-I", "-S", "-"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mark ")
    return json.loads(done.stdout[5:])


def test_a_program_brings_what_it_imports(tmp_path):
    assert answer(polling.run_info, run_dir=str(tmp_path), lines=1)["run"]["state"] == state.PREPARED


def test_a_host_is_probed_and_looked_over(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    probe = answer(host.host_info, base_dir="~/nanochat-ddp")["probe"]
    assert probe["base_dir"] == f"{tmp_path}/nanochat-ddp" and probe["cpu"]["available"] >= 1
    folders = dict.fromkeys(["dest", "venv_dir", "data_dir", "run_dir"], "~/none")
    seen = answer(setup_look.setup_info, files={}, digest="", pins={}, **folders)
    assert [seen[part]["ready"] for part in ("files", "venv", "data")] == [False, False, False]


def test_a_run_folder_is_deployed_and_its_keeper_starts(tmp_path):
    plan = {"keeper": {"port": 1}, "nodes": []}
    params = {"path": str(tmp_path / "run"), "plan": plan, "host": "node1", "keeper_secret": "secret"}
    assert answer(deployment.run_folder, **params)["changed"]
    assert json.loads((tmp_path / "run/plan.json").read_text()) == plan
    keeper = (tmp_path / "run/.keeper/keeper.py").read_text()
    # A program that is built from within another program is the one that the collection builds.
    assert keeper == host_code.program(deployment.keeper.__name__, "main", str(tmp_path / "run"))


@pytest.mark.parametrize("verb", [*verbs.ON_HOSTS.values(), *verbs.BEHIND.values(), runner.main])
def test_each_source_comes_after_what_it_needs(verb):
    names = [name for name, dummy_source in host_code.sources(verb.__module__)]
    assert names[-1] == verb.__module__
    assert len(names) == len(set(names))


def test_what_another_room_lends_is_found():
    names = [name.rpartition(".")[2] for name, dummy_source in host_code.sources(runner.__name__)]
    assert " ".join(names) == "files processes politeness env_file priority reaper document ownership record runner"


def test_a_loader_that_gives_bytes_is_understood(monkeypatch):
    """Like the loader of collections on the controller."""
    source = host_code.sources(setup_look.__name__)

    class Loader:
        @staticmethod
        def get_source(name):
            return dict(source)[name].encode("utf-8")

    host_code._read.cache_clear()
    monkeypatch.setattr(host_code.importlib, "import_module", lambda name: type("module", (), {"__loader__": Loader}))
    assert host_code.sources(setup_look.__name__) == source
