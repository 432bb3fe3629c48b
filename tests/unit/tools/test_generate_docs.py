# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages that are made from tables in the code say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings, settings_table
from ansible_collections.nanochat.ddp.tools import generate_docs

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", list(generate_docs.PAGES))
def test_the_page_is_in_step_with_the_code(name):
    assert (ROOT / name).read_text(encoding="utf-8") == generate_docs.PAGES[name](), "run tools/generate_docs.py"


def test_the_list_of_settings_beside_the_inventory_shows_all_and_sets_none():
    text = (ROOT / "inventory/group_vars/trainers.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) is None, "it would win over hosts.yml"
    # Whoever takes out the marks gets the defaults of the real profile.
    given = yaml.safe_load(re.sub(r"^# (?=ddp_)", "", text, flags=re.MULTILINE))
    assert list(given) == list(settings_table.rows())
    real = {"ddp_profile": "real"}
    assert settings.resolve([("node1", {**given, **real})]).run == settings.resolve([("node1", real)]).run
    assert given["ddp_profile"] == "smoke"
