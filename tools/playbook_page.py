# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes docs/playbooks.md from the playbooks themselves, for tools/generate_docs.py: a section for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PLAYBOOKS = Path(__file__).resolve().parents[1] / "playbooks"
# In the order in which one needs them.
ORDER = ["plan", "preflight", "train", "status", "logs", "doctor", "stop", "leave", "join", "collect", "chat", "reset"]
# What every playbook takes.
HEAD = """# Playbooks

<!-- Written by tools/generate_docs.py from playbooks/. -->

Each is called as `ansible-playbook nanochat.ddp.NAME -i INVENTORY`, `train` from the folder of the checkout also as
`ansible-playbook train.yml -i INVENTORY`. All of them take every setting ([settings.md](settings.md)) with `-e`, and
`-e target=HOST,HOST` for other hosts than the group `trainers`; those that look at a run take `-e ddp_run=NAME` for another one than
the newest.
"""


def heading(text: str) -> str:
    """The comment below the first line."""
    lines = text.splitlines()[1:]
    return " ".join(
        line.removeprefix("#").strip()
        for line in lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    )


def words(text: str) -> str:
    """Set the options in the text as code."""
    value = r"""[\w.,/"-]*[\w/"-]"""
    option = re.compile(rf"-e (?:'[^']*'|\w+={value})(?: -e \w+={value})*")
    # Text that is code already stays unchanged.
    parts = text.split("`")
    return "`".join(part if at % 2 else option.sub(r"`\g<0>`", part) for at, part in enumerate(parts))


def steps(tasks: list[dict[str, Any]]) -> Iterator[str]:
    """The steps in order, with the tags that select each alone."""
    for task in tasks:
        if "block" in task:
            yield from steps(task["block"])
            continue
        role = next((task[key]["name"] for key in task if key.endswith(("import_role", "include_role"))), None)
        tags = [tag for tag in task.get("tags", []) if tag not in ("always", "never")]
        line = f"1. {task['name']}"
        line += f" (role [{role.rpartition('.')[2]}](../roles/{role.rpartition('.')[2]}/README.md))" if role else ""
        yield line + (f"; tags {', '.join(f'`{tag}`' for tag in tags)}" if tags else "")


def section(name: str) -> Iterator[str]:
    text = (PLAYBOOKS / f"{name}.yml").read_text(encoding="utf-8")
    yield from (f"## {name}", "", words(heading(text)), "")
    for play in yaml.safe_load(text):
        yield from steps(play.get("tasks", []))
        for key, other in play.items():
            if key.endswith("import_playbook"):
                tags = ", ".join(f"`{tag}`" for tag in play["tags"] if tag != "never")
                yield f"1. with the tag {tags} alone: the playbook [{other.removesuffix('.yml')}](#{other.removesuffix('.yml')})"
    yield ""


def page() -> str:
    """docs/playbooks.md; a playbook that ORDER lacks is an error."""
    there = {path.stem for path in PLAYBOOKS.glob("*.yml")}
    if there != set(ORDER):
        raise SystemExit(
            f"tools/playbook_page.py: ORDER differs from playbooks/ in {', '.join(sorted(there ^ set(ORDER)))}."
        )
    return "\n".join([HEAD, *(line for name in ORDER for line in section(name))]).rstrip() + "\n"
