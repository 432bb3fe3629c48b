# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for plays: a variable of several hosts, a setting or its default, names from hosts."""

from __future__ import annotations

import shlex

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.values import of_hosts, one_run, plain_name, seen_of, setting
from ansible_collections.nanochat.ddp.plugins.module_utils._run.state import EMPTY
from ansible_collections.nanochat.ddp.plugins.plugin_utils._runs import command_on


def test_a_host_without_the_variable_is_not_left_out():
    hostvars = {
        "desktop": {"seen": {"run": {**EMPTY, "run": "d4", "state": "running"}}},
        "laptop": {},
        "off": {},
    }
    found = of_hosts(["desktop", "laptop"], hostvars, "seen")
    assert list(found) == ["desktop", "laptop"] and found["laptop"] is None
    assert of_hosts(["laptop"], hostvars, "seen", {}) == {"laptop": {}}
    assert [one.problem for one in seen_of(found)] == [None, "it did not answer"]
    assert one_run(found) == "d4"


def test_a_variable_that_no_host_has_is_a_mistake():
    with pytest.raises(AnsibleFilterError, match="none of desktop, laptop has a variable sen"):
        of_hosts(["desktop", "laptop"], {"desktop": {"seen": 1}, "laptop": {}}, "sen")
    assert of_hosts([], {}, "seen") == {}


@pytest.mark.parametrize(("given", "taken"), [(None, "~/nanochat-ddp"), ("", "~/nanochat-ddp"), ("/data", "/data")])
def test_an_empty_setting_has_its_default(given, taken):
    assert setting(given, "ddp_base_dir") == taken


def test_a_name_from_a_host_is_plain_or_refused_in_a_sentence():
    assert plain_name("3.11-x86_64") == "3.11-x86_64"
    with pytest.raises(AnsibleFilterError, match="plain name"):
        plain_name("../x")


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
    *before, command = shlex.split(command_on("laptop", known, ["tail", "-F", LOG]))
    assert before == words and shlex.split(command) == ["tail", "-F", LOG]


def test_a_command_for_this_machine_needs_no_ssh():
    assert shlex.split(command_on("laptop", {"ansible_connection": "local"}, ["tail", "-F", LOG])) == [
        "tail",
        "-F",
        LOG,
    ]
