# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rows of the table; a new setting needs nothing but a row."""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import settings, settings_table
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.findings import PlanError
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import resolve
from ansible_collections.nanochat.ddp.plugins.module_utils._rules import ways
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._plan.plan_probes import planned
from ansible_collections.nanochat.ddp.tools import generate_docs

(TRAINERS,) = (Path(__file__).resolve().parents[5] / "trainer" / "nanochat").rglob("settings.py")


@functools.cache
def trainers_fields() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and choices of each field of the trainer's Settings, read from its source, since importing it takes torch."""
    found = {}
    for kind in ast.parse(TRAINERS.read_text(encoding="utf-8")).body:
        for field in kind.body if isinstance(kind, ast.ClassDef) and kind.name == "Settings" else []:
            if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
                written = ast.unparse(field.value.args[2]) if len(field.value.args) > 2 else "()"
                # Names of ways come from the rules that both share.
                choices = tuple(ways.WAYS) if written == "tuple(ways.WAYS)" else ast.literal_eval(written)
                found[field.target.id] = (ast.unparse(field.annotation), choices)  # type: ignore[union-attr]
    return found


def test_every_default_and_every_value_of_a_profile_is_valid():
    for profile in settings_table.PROFILE_NAMES:
        for name, value in settings.defaults(profile).items():
            if value is not None:
                assert settings.convert(settings_table.find(name), value) == value


def test_each_setting_has_a_reason_of_one_line():
    for setting in settings_table.rows().values():
        assert setting.why.endswith("."), setting.name
        assert "\n" not in setting.why and len(setting.why) < 125, setting.name
        assert setting.default is not None or setting.empty, setting.name


@pytest.mark.parametrize("row", [row for row in settings_table.rows().values() if row.flag], ids=lambda row: row.name)
def test_a_row_with_a_flag_fits_the_field_of_the_trainer(row):
    kind, choices = trainers_fields()[row.flag.replace("-", "_")]
    assert kind in (row.kind, {"int": "float"}.get(row.kind)), "another type"
    # The plan resolves auto.
    assert not choices or set(row.choices) - {"auto"} <= set(choices), "other choices"


@dataclasses.dataclass(frozen=True)
class OneMore(settings_table.RunSettings):
    """The settings with a made-up one, as a row in the table would have it."""

    warmup: int = settings_table.setting(
        "The training", None, "Steps in which the learning rate grows.", smoke=3, real=40, low=0, flag="warmup-steps"
    )


def test_a_row_is_all_that_a_setting_takes(monkeypatch):
    monkeypatch.setattr(settings_table, "RunSettings", OneMore)
    # It is read, checked and refused by its name.
    asked: Any = resolve([("desktop", {"ddp_warmup": "7"})])
    assert asked.run.warmup == 7 and asked.given == {"ddp_warmup"}
    assert resolve([("desktop", {})]).run.warmup == 3  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="ddp_warmup is -1 on desktop; it must be an integer of at least 0"):
        resolve([("desktop", {"ddp_warmup": -1})])
    with pytest.raises(PlanError, match="did you mean ddp_warmup"):
        resolve([("desktop", {"ddp_warmpu": 1})])
    # The pages show it.
    page, inventory = generate_docs.settings_page(), generate_docs.group_vars()
    assert "| `ddp_warmup` | profile | Steps in which the learning rate grows. | an integer of at least 0 |" in page
    assert "| `ddp_warmup` | 3 | 40 |" in page and "ddp_warmup:" in inventory
    # The ranks are started with it, by a flag that the trainer has.
    node = planned({"ddp_warmup": 7})["nodes"][0]
    assert node["flags"]["warmup-steps"] == 7 and "--warmup-steps=7" in node["argv"]
    test_a_row_with_a_flag_fits_the_field_of_the_trainer(settings_table.find("ddp_warmup"))
