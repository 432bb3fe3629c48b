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
from ansible_collections.nanochat.ddp.plugins.plugin_utils._agent.carrier import HOST_FILES


def answer(verb, **params):
    """The answer of a verb's program, from a Python with only its standard library."""
    told = ("mark ", verb.__module__, verb.__name__, params, {}, {})
    text = host_code.program(bare.__name__, "answer", *told, needs=(verb.__module__,))
    done = subprocess.run([sys.executable, "-I", "-S", "-"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mark ")
    return json.loads(done.stdout[5:])


def test_a_run_folder_is_deployed_and_its_keeper_starts(tmp_path):
    plan = {"keeper": {"port": 1}, "nodes": []}
    params = {"path": str(tmp_path / "run"), "plan": plan, "host": "node1", "keeper_secret": "secret"}
    assert answer(deployment.run_folder, **params, check=True)["changed"] and not (tmp_path / "run").exists()
    assert answer(deployment.run_folder, **params)["changed"]
    assert json.loads((tmp_path / "run/plan.json").read_text()) == plan
    keeper = (tmp_path / "run/.keeper/keeper.py").read_text()
    # A program that is built from within another program is the one that the collection builds.
    assert keeper == host_code.program(deployment.keeper.__name__, "main", str(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    refused = answer(deployment.run_folder, path=f"{tmp_path}/file/run", plan={}, state="ready")
    assert "cannot be created" in refused["msg"]


@pytest.mark.parametrize("file", [*HOST_FILES, "_session.runner"])
def test_each_source_comes_after_what_it_needs(file):
    names = [name for name, dummy in json.loads(host_code.sources_text((f"{host_code.PACKAGE}.{file}",)))]
    assert names[-1] == f"{host_code.PACKAGE}.{file}"
    assert len(names) == len(set(names))
