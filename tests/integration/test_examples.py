# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The examples of README and guides, pasted into a copy of the shipped inventory: each is planned."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_table import RUN, rows
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, ansible, free_port

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("start", "membership", "seeing"))]
PAGES += sorted((ROOT / "docs/guides").glob("*.md"))
BEGINS_FILE, BEGINS_PART = "trainers:\n", "  vars:\n"
# Plays that change what is there need no plan of their own.
PLANNED = ("train.yml", "nanochat.ddp.plan", "nanochat.ddp.preflight")


class Example(NamedTuple):
    """Text for hosts.yml, or words of a command, that a page tells people to write."""

    page: str
    yaml: str = ""
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words) or ' '.join(self.yaml.split())[:60]}"


def examples() -> Iterator[Example]:
    """Every block of YAML, and every command that plans with settings."""
    seen = set()
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        yield from (Example(page, block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
        for command in re.findall(
            r"ansible-playbook ([^`\n|#]+)", text.replace("`... -e", "`ansible-playbook train.yml -e")
        ):
            playbook, *words = shlex.split(command)
            if playbook in PLANNED and (given := tuple(settings_in(words))) and given not in seen:
                seen.add(given)
                yield Example(page, words=given)


def settings_in(words: list[str]) -> Iterator[str]:
    for option, value in itertools.pairwise(words):
        if option == "-e" and value.startswith("ddp_"):
            yield from (option, value)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home that the examples take for granted: a folder of text, one of shards, and a trained model."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("Call me Ishmael.\n")
    (tmp_path / "shards" / "tokenizer").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "shards" / f"shard_{number:05d}.parquet").write_bytes(b"PAR1")
    for name in ("tokenizer.pkl", "token_bytes.pt"):
        (tmp_path / "shards" / "tokenizer" / name).write_bytes(b"x")
    (tmp_path / "desktop/runs/d4/base_checkpoints/d4").mkdir(parents=True)
    for name in ("model_000010.pt", "meta_000010.json"):
        (tmp_path / "desktop/runs/d4/base_checkpoints/d4" / name).write_text("{}")
    shutil.copytree(ROOT / "inventory", tmp_path / "inventory")
    (tmp_path / "inventory" / "host_vars").mkdir()
    return tmp_path


def planned(home: Path, *words: str) -> dict[str, Any]:
    """The plan of the copied inventory, all of whose hosts are this machine, so that each needs a folder of its own."""
    written = yaml.safe_load((home / "inventory" / "hosts.yml").read_text(encoding="utf-8"))["trainers"]
    for host, own in written["hosts"].items():
        if "ddp_base_dir" not in {**written.get("vars", {}), **(own or {})}:
            (home / "inventory" / "host_vars" / f"{host}.yml").write_text(f'ddp_base_dir: "{home}/{host}"\n')
    kept = home / "plan.json"
    more = {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ddp_plan_file": str(kept), "ddp_port": free_port(),
    }  # fmt: skip
    done = ansible(
        "ansible-playbook",
        "nanochat.ddp.plan",
        "-i",
        home / "inventory",
        "-e",
        json.dumps(more),
        *words,
        HOME=str(home),
        # Otherwise the demo's run of this machine is that of the inventory.
        NANOCHAT_DDP_HOME=str(home / "cache"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(kept.read_text())["plan"]
    return found


# What follows -e wins in any case, so these are played less often.
SLOW = {True: [pytest.mark.long], False: []}


@pytest.mark.parametrize("example", [pytest.param(one, marks=SLOW[bool(one.words)], id=str(one)) for one in examples()])
def test_an_example_is_planned(home: Path, example: Example) -> None:
    file = home / "inventory" / "hosts.yml"
    (own,) = (one.yaml for one in examples() if one.page == "README.md" and one.yaml)
    file.write_text(example.yaml if example.yaml.startswith(BEGINS_FILE) else own + example.yaml)
    written = yaml.safe_load(file.read_text(encoding="utf-8"))["trainers"]
    plan = planned(home, *example.words)
    assert [node["host"] for node in plan["nodes"]] == list(written["hosts"])


def test_the_lines_of_an_example_do_the_same_below_the_settings_of_the_demo(home: Path) -> None:
    (part,) = (one.yaml for one in examples() if one.page == "docs/guides/own-text.md" and one.yaml)
    file = home / "inventory" / "hosts.yml"
    file.write_text(file.read_text(encoding="utf-8") + part.removeprefix(BEGINS_PART))
    plan = planned(home)
    assert (plan["data"]["source"], plan["data"]["paths"], plan["model"]["depth"]) == ("text", [f"{home}/books"], 2)


def test_an_inventory_with_the_full_list_of_earlier_versions_keeps_its_meaning(home: Path) -> None:
    shipped = {row.name: row.default for row in rows().values() if row.scope == RUN}
    shipped |= {"ddp_min_hosts": 0, "ddp_survive_reboot": False, "ddp_save_minutes": 30}
    (home / "inventory" / "group_vars" / "trainers.yml").write_text(json.dumps(shipped))
    (own,) = (one.yaml for one in examples() if one.page == "README.md" and one.yaml)
    (home / "inventory" / "hosts.yml").write_text(own)
    plan = planned(home, "-e", "ddp_profile=real")
    assert (plan["model"]["depth"], plan["training"]["iterations"], plan["training"]["save_minutes"]) == (8, 5000, 30)
    assert plan["keeper"] == {"restarts": 3, "min_hosts": 2, "grace_seconds": 30, "survive_reboot": False}
