# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pages that are made from tables in the code say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import (
    findings_table,
    settings,
    settings_table,
)
from ansible_collections.nanochat.ddp.plugins.module_utils._plan.planner import make_plan
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import hosts, lan
from ansible_collections.nanochat.ddp.tools import generate_docs

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", list(generate_docs.PAGES))
def test_the_page_is_in_step_with_the_code(name):
    assert (ROOT / name).read_text(encoding="utf-8") == generate_docs.PAGES[name](), "run tools/generate_docs.py"


def test_the_words_of_errors_lead_to_codes_that_there_are():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").partition("## By code")[0]
    assert set(re.findall(r"\]\(#([a-z-]+)\)", page)) <= set(findings_table.CATALOGUE)


def test_the_page_of_playbooks_has_all():
    assert set(generate_docs.PLAYBOOKS) == {path.stem for path in (ROOT / "playbooks").glob("*.yml")}


def test_the_list_of_settings_beside_the_inventory_shows_all_and_sets_none():
    text = (ROOT / "inventory/group_vars/trainers.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) is None, "it would win over hosts.yml"
    # Whoever takes out the marks gets the defaults of the real profile.
    given = yaml.safe_load(re.sub(r"^# (?=ddp_)", "", text, flags=re.MULTILINE))
    assert list(given) == list(settings_table.rows())
    real = {"ddp_profile": "real"}
    assert settings.resolve([("node1", {**given, **real})]).run == settings.resolve([("node1", real)]).run
    assert given["ddp_profile"] == "smoke"


@pytest.mark.parametrize(("name", "machines"), [("home", hosts()), ("lab", lan(10))])
def test_an_inventory_of_the_docs_is_planned_as_it_says(name, machines):
    source = ROOT / "docs" / "inventories" / f"{name}.yml"
    inventory = InventoryManager(DataLoader(), [str(source)])
    group, found = inventory.groups["trainers"].get_vars(), inventory.groups["trainers"].get_hosts()
    given = [{**group, **{key: value for key, value in host.vars.items() if key.startswith("ddp_")}} for host in found]
    for machine, host, own in zip(machines, found, given, strict=True):
        machine.update(name=host.name, settings={key: value for key, value in own.items() if key.startswith("ddp_")})
    plan = make_plan(machines, tolerant=True).plan
    assert plan["training"]["profile"] == "real"
    assert [node["nic"] for node in plan["nodes"]] == [own.get("ddp_nic", "eth0") for own in given]
    assert plan["training"]["total_batch"] == group["ddp_total_batch"]
    assert plan["keeper"]["min_hosts"] == group.get("ddp_min_hosts", 1)
