# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sets of processors worth timing, on machines that exist only as files."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.cores import core_sets, cpus, listed


class MachineFiles:
    """A /sys with these processors."""

    def __init__(self, root):
        self.root = root
        self.count = 0

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cpu(self, core, package=0, capacity=None):
        folder = f"devices/system/cpu/cpu{self.count}"
        self.write(f"{folder}/topology/core_id", core)
        self.write(f"{folder}/topology/physical_package_id", package)
        if capacity:
            self.write(f"{folder}/cpu_capacity", capacity)
        self.count += 1

    def sets(self, allowed=None, quota=None):
        found = core_sets(cpus(set(range(self.count)) if allowed is None else allowed, str(self.root)), quota)
        return {one["name"]: one["cpus"] for one in found}


@pytest.fixture
def machine(tmp_path):
    return MachineFiles(tmp_path)


def hybrid(machine, big, small):
    """Intel's: large cores with two threads each, beside each other, then small cores with one."""
    for core in range(big):
        machine.cpu(core * 4)
        machine.cpu(core * 4)
    for core in range(small):
        machine.cpu(big * 4 + core)
    machine.write("devices/cpu_core/cpus", f"0-{2 * big - 1}")
    machine.write("devices/cpu_atom/cpus", f"{2 * big}-{2 * big + small - 1}")


def test_lists_of_the_kernel():
    assert listed("0-3,8\n") == [0, 1, 2, 3, 8]
    assert listed("") == []


def test_field_33_i9_13900kf(machine):
    hybrid(machine, 8, 16)
    fast = list(range(0, 16, 2))
    assert machine.sets() == {
        "fast cores": fast,
        "all cores": fast + list(range(16, 32)),
        "all threads of the fast cores": list(range(16)),
    }
    assert next(iter(machine.sets())) == "fast cores"  # what is taken before anything was timed


def test_field_33_i5_12450h(machine):
    hybrid(machine, 4, 4)
    assert machine.sets()["fast cores"] == [0, 2, 4, 6]
    assert machine.sets()["all cores"] == [0, 2, 4, 6, 8, 9, 10, 11]


def test_a_server_of_two_sockets(machine):
    for package in (0, 1):
        for core in range(4):
            machine.cpu(core, package)
    for package in (0, 1):
        for core in range(4):
            machine.cpu(core, package)
    machine.write("devices/system/node/online", "0-1")
    machine.write("devices/system/node/node0/cpulist", "0-3,8-11")
    machine.write("devices/system/node/node1/cpulist", "4-7,12-15")
    assert machine.sets() == {
        "all cores": list(range(8)),
        "cores of one socket": [0, 1, 2, 3],
        "all threads": list(range(16)),
    }


def test_an_arm_board_with_big_and_little_cores(machine):
    for core, capacity in enumerate([400, 400, 400, 400, 1024, 1024]):
        machine.cpu(core, capacity=capacity)
    assert machine.sets() == {"fast cores": [4, 5], "all cores": [0, 1, 2, 3, 4, 5]}


def test_wsl2_and_other_machines_of_one_kind_leave_no_choice(machine):
    for core in range(4):
        machine.cpu(core)
    assert machine.sets() == {"all cores": [0, 1, 2, 3]}


def test_without_any_topology_every_processor_is_a_core(machine):
    machine.count = 3
    assert machine.sets() == {"all cores": [0, 1, 2]}


def test_limits_hold(machine):
    hybrid(machine, 4, 4)
    machine.write("devices/system/cpu/online", "0-9")
    machine.write("devices/system/cpu/isolated", "0-1")
    assert machine.sets()["all cores"] == [2, 4, 6, 8, 9]
    assert machine.sets(allowed={2, 3, 8})["fast cores"] == [2]
    assert machine.sets(quota=2.0)["fast cores"] == [2, 4]
    assert all(len(found) <= 2 for found in machine.sets(quota=2.0).values())
