# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The processors to compute on, on machines that exist only as files."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._probe.machine import cpus, fast_cores


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

    def fast(self, allowed=None):
        return fast_cores(cpus(set(range(self.count)) if allowed is None else allowed, str(self.root)))


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


def test_field_33_i9_13900kf(machine):
    hybrid(machine, 8, 16)
    assert machine.fast() == list(range(0, 16, 2))


def test_a_server_of_two_sockets(machine):
    for package in (0, 1, 0, 1):
        for core in range(4):
            machine.cpu(core, package)
    assert machine.fast() == list(range(8))


def test_an_arm_board_with_big_and_little_cores(machine):
    for core, capacity in enumerate([400, 400, 400, 400, 1024, 1024]):
        machine.cpu(core, capacity=capacity)
    assert machine.fast() == [4, 5]


def test_limits_hold(machine):
    hybrid(machine, 4, 4)
    machine.write("devices/system/cpu/online", "0-9")
    machine.write("devices/system/cpu/isolated", "0-1")
    assert machine.fast() == [2, 4, 6]
    assert machine.fast(allowed={2, 3, 8}) == [2]
    # A user who may only use small cores computes on those.
    assert machine.fast(allowed={8, 9}) == [8, 9]
