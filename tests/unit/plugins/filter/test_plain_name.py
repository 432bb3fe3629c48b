# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names from hosts that become those of files here."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.nanochat.ddp.plugins.filter.values import plain_name


@pytest.mark.parametrize("name", ["d4", "3.11-x86_64", "run_2", "a" * 100])
def test_plain_names_pass(name):
    assert plain_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "a/b", ".ssh", "-rf", "a\0", "a\n", "a" * 101, None, 4, ["a"], {}]
)
def test_others_are_refused(name):
    with pytest.raises(AnsibleFilterError, match="plain name"):
        plain_name(name)
