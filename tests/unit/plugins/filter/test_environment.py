# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ddp_secret_env is written as the plan has read it."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.values import environment
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import env_file


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"A": "b"}, {"A": "b"}),
        ('{"A": "b"}', {"A": "b"}),
        (
            {"A": True, "B": False, "C": None, "D": 5, "E": 1.5},
            {"A": "true", "B": "false", "C": "", "D": "5", "E": "1.5"},
        ),
        ({}, {}),
    ],
)
def test_every_form_that_the_plan_takes(given, read):
    assert environment(given) == read
    env_file.checked(environment(given))


@pytest.mark.parametrize("given", ["A=b", "[]", "[" * 3000, 5, ["A"], {"A": ["b"]}, {"A": {}}, {"a b": "c"}])
def test_what_is_refused_is_not_shown(given):
    with pytest.raises(AnsibleFilterError, match="ddp_secret_env must be") as caught:
        environment(given)
    assert "b" not in str(caught.value).replace("variables", "").replace("be a", "")
