# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Code of ours as a program that needs nothing but Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code
from ansible_collections.nanochat.ddp.plugins.module_utils._preflight import setup_look
from ansible_collections.nanochat.ddp.plugins.module_utils._probe import host
from ansible_collections.nanochat.ddp.plugins.module_utils._run import look, state
from ansible_collections.nanochat.ddp.plugins.module_utils._session import runner
from ansible_collections.nanochat.ddp.plugins.module_utils._shards import server


def told(module, params):
    """What the module's program answers, from a Python that has nothing but its own library."""
    text = host_code.program(module.__name__, "say", "mark ", params)
    answer = subprocess.run([sys.executable, "-I", "-S", "-"], input=text, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("mark ")
    return json.loads(answer.stdout[5:])


def test_a_program_brings_what_it_imports(tmp_path):
    params = {"run_dir": str(tmp_path), "base_dir": None, "rank": None, "wait": None, "lines": 1, "plan": False}
    assert told(look, params)["run"]["state"] == state.PREPARED


def test_a_host_is_probed_and_looked_over_without_a_module(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    probe = told(host, {name: option.get("default") for name, option in host.OPTIONS.items()})["probe"]
    assert probe["base_dir"] == f"{tmp_path}/nanochat-ddp" and probe["cpu"]["logical"] >= 1
    folders = {name: "~/none" for name, option in setup_look.OPTIONS.items() if option["type"] == "path"}
    seen = told(setup_look, {**{name: option.get("default") for name, option in setup_look.OPTIONS.items()}, **folders})
    assert [seen[part]["ready"] for part in ("files", "venv", "data")] == [False, False, False]


@pytest.mark.parametrize("module", [look, host, setup_look, runner, server])
def test_each_source_comes_after_what_it_needs(module):
    names = [name for name, dummy_source in host_code.sources(module.__name__)]
    assert names[-1] == module.__name__
    assert len(names) == len(set(names))


def test_what_another_room_lends_is_found():
    names = [name.rpartition(".")[2] for name, dummy_source in host_code.sources(runner.__name__)]
    assert names == ["processes", "files", "reaper", "document", "record", "runner"]


def test_a_loader_that_gives_bytes_is_understood(monkeypatch):
    """As the one by which Ansible loads a collection on the controller."""
    source = host_code.sources(server.__name__)

    class Loader:
        @staticmethod
        def get_source(name):
            return dict(source)[name].encode("utf-8")

    monkeypatch.setattr(host_code.importlib, "import_module", lambda name: type("module", (), {"__loader__": Loader}))
    assert host_code.sources(server.__name__) == source
