# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages that are made from tables in the code say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings, settings_table
from ansible_collections.nanochat.ddp.tools import generate_docs

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", list(generate_docs.PAGES))
def test_the_page_is_in_step_with_the_code(name):
    assert (ROOT / name).read_text(encoding="utf-8") == generate_docs.PAGES[name](), "run tools/generate_docs.py"


def test_the_default_inventory_shows_every_setting_and_gives_only_defaults():
    text = (ROOT / "inventory/group_vars/trainers.yml").read_text(encoding="utf-8")
    given = yaml.safe_load(text)
    assert settings.resolve([("node1", given)]).run == settings.resolve([("node1", {})]).run
    for setting in settings_table.rows().values():
        assert f"{setting.name}:" in text
        # Those of a host stand in hosts.yml, which a group's file would overrule.
        assert (setting.name in given) == (setting.scope == settings_table.RUN)


@pytest.mark.parametrize("name", ["home", "lab"])
def test_the_settings_of_other_topologies_are_valid(name):
    folder = ROOT / "docs" / "inventories" / name
    group = yaml.safe_load((folder / "group_vars/trainers.yml").read_text(encoding="utf-8"))
    trainers = yaml.safe_load((folder / "hosts.yml").read_text(encoding="utf-8"))["trainers"]
    hosts = [(host, {**group, **trainers.get("vars", {}), **(own or {})}) for host, own in trainers["hosts"].items()]
    settings.resolve(hosts)
