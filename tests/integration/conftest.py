# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of several tests: modules run as in the unit tests, but against the real tools; hosts in namespaces."""

from __future__ import annotations

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import Lan, can_make_namespaces
from ansible_collections.nanochat.ddp.tests.unit.conftest import call, run_module, warnings

__all__ = ["call", "run_module", "warnings"]


@pytest.fixture
def make_lan(tmp_path):
    """`make_lan(count=2)` returns a Lan that is closed after the test."""
    if not can_make_namespaces():
        pytest.skip("needs the right to make network namespaces")
    made = []

    def make(*options, **more):
        made.append(Lan(tmp_path, *options, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def lan(make_lan):
    """Two hosts."""
    return make_lan()
