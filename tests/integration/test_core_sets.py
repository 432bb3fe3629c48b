# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rehearsal times every set of processors; the program that computes is played by a script."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.nanochat.ddp.tests.integration.local import ROOT
from ansible_collections.nanochat.ddp.tests.integration.role_play import played

PYTHON = """#!/bin/sh
echo "cores=$NANOCHAT_CORES threads=$OMP_NUM_THREADS seconds=$6" >> "{log}"
case "$NANOCHAT_CORES" in 0,2) speed=100 ;; 0,2,4,5) speed=150 ;; *) echo '{{"error": "no"}}'; exit 1 ;; esac
echo "{{\\"tokens_per_second\\": $speed}}"
"""
SETS = [
    {"name": "fast cores", "cpus": [0, 2]},
    {"name": "all cores", "cpus": [0, 2, 4, 5]},
    {"name": "all threads of the fast cores", "cpus": [0, 1, 2, 3]},
]


def measure(folder: Path, kept: dict) -> dict:
    """The measurements that the role uses."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON.format(log=folder / "log"))
    python.chmod(0o755)
    node = {
        "core_sets": SETS, "venv_dir": str(folder / "venv"), "trainer_dir": str(folder), "env": {"OMP_NUM_THREADS": "2"},
        "env_secret": [], "threads": 2, "dtype": "float32", "flags": {"depth": 1},
        "host": "localhost",
    }  # fmt: skip
    plan = {
        "model": {"vocab_size": 300},
        "training": {"device_batch": 2, "matmul": "fp32", "matmul_tried": ["fp32"]},
        "trainer": {"torch": "2"},
    }
    play = {
        "vars": {
            "preflight_plan": {**plan, "nodes": [node]}, "preflight_node": node, "preflight_measure_seconds": 10,
            "preflight_probe": {"cpu": {"model": "x"}, "measured": kept}, "__preflight_seen": {},
        },
        "tasks": [
            {"ansible.builtin.include_tasks": str(ROOT / "roles/preflight/tasks/measure.yml")},
            {"ansible.builtin.copy": {"content": "{{ __preflight_measured | to_json }}", "dest": str(folder / "found")}},
        ],
        "vars_files": [str(ROOT / "roles/preflight/vars/main.yml")],
    }  # fmt: skip
    played(folder, play)
    return dict(json.loads((folder / "found").read_text()))


def test_field_33_each_set_is_timed_for_a_moment_and_the_fastest_is_kept(tmp_path):
    found = measure(tmp_path, {})
    assert (tmp_path / "log").read_text().splitlines() == [
        "cores=0,2 threads=2 seconds=3.0",
        "cores=0,2,4,5 threads=4 seconds=3.0",
        "cores=0,1,2,3 threads=4 seconds=3.0",
    ]
    assert (found["cores"], found["cores_name"], found["tokens_per_second"]) == ([0, 2, 4, 5], "all cores", 150)
    assert found["sets"] == {"fast cores": 100, "all cores": 150}
    # A second call measures nothing again.
    assert measure(tmp_path, found) == found
    assert len((tmp_path / "log").read_text().splitlines()) == 3
