# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Command lines for a person."""

from __future__ import annotations

import shlex

import pytest
from ansible_collections.nanochat.ddp.plugins.filter.values import by_hand

LOG = "/srv/my runs/rank1.log"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, ["ssh", "laptop"]),
        (
            {"ansible_host": "10.0.0.2", "ansible_user": "xiaoxin", "ansible_port": 22},
            ["ssh", "-p", "22", "xiaoxin@10.0.0.2"],
        ),
        ({"ansible_ssh_private_key_file": "/my key"}, ["ssh", "-i", "/my key", "laptop"]),
        ({"ansible_ssh_common_args": "-J 'gate way' -v"}, ["ssh", "-J", "gate way", "-v", "laptop"]),
    ],
)
def test_a_command_for_a_host_is_reached_as_ansible_reaches_it(known, words):
    *before, command = shlex.split(by_hand("laptop", known, ["tail", "-F", LOG]))
    assert before == words and shlex.split(command) == ["tail", "-F", LOG]


def test_a_command_for_this_machine_needs_no_ssh():
    assert shlex.split(by_hand("laptop", {"ansible_connection": "local"}, ["tail", "-F", LOG])) == ["tail", "-F", LOG]
