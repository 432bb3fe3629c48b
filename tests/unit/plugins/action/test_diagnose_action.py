# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action that judges the evidence of all ranks."""

from __future__ import annotations

import json

import pytest
from ansible.errors import AnsibleError

PLAN = {
    "run": "d4",
    "master": {"host": "a", "address": "10.0.0.1", "port": 29500},
    "nodes": [
        {"host": "a", "rank": 0, "nic": "eth0", "env": {"MY_TOKEN": "hunter2!"}},
        {"host": "b", "rank": 1, "nic": "eth0"},
    ],
}
DONE = {"evidence": {"run": {"state": "finished", "step": 9, "last_lines": ["login with s3cr3t"]}}}


def test_the_verdict_is_returned_and_all_of_it_kept_without_secrets(judge, tmp_path):
    path = tmp_path / "runs" / "doctor.json"
    told = judge("verdict", plan=PLAN, evidence={"a": DONE, "b": DONE}, secrets=[{"KEY": "s3cr3t"}], file=str(path))
    assert told["verdict"]["code"] == "not-running" and told["changed"] is False
    assert told["text"].startswith("not-running: No rank runs") and str(path) in told["text"]
    assert path.stat().st_mode & 0o777 == 0o600
    kept = path.read_text()
    assert json.loads(kept)["verdict"] == told["verdict"] and "s3cr3t" not in kept and "hunter2" not in kept


def test_a_host_without_any_evidence_is_an_error(judge):
    with pytest.raises(AnsibleError, match="no evidence, not even a failed one, from b"):
        judge("verdict", plan=PLAN, evidence={"a": DONE})


def test_a_folder_that_cannot_be_written_is_told(judge, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(AnsibleError, match="could not be written"):
        judge("verdict", plan=PLAN, evidence={"a": DONE, "b": DONE}, file=str(tmp_path / "runs" / "doctor.json"))
