# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for plays: a variable of several hosts, a setting or its default, names from hosts."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.values import of_hosts, one_run, plain_name, seen_of, setting


def test_a_host_without_the_variable_is_not_left_out():
    hostvars = {
        "desktop": {"seen": {"run": {"run": "d4", "state": "running", "session_age": 1.0}}},
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


@pytest.mark.parametrize("name", ["d4", "3.11-x86_64", "run_2", "a" * 100])
def test_plain_names_pass(name):
    assert plain_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "a/b", ".ssh", "-rf", "a\0", "a\n", "a" * 101, None, 4, ["a"], {}]
)
def test_other_names_are_refused(name):
    with pytest.raises(AnsibleFilterError, match="plain name"):
        plain_name(name)
