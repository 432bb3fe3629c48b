# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the pages that are made from tables in the code. Run from any checkout: python tools/generate_docs.py"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

WIDTH = 140
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ansible" / "collections"))

from ansible_collections.nanochat.ddp.plugins.module_utils._contract import findings_table, settings_table  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings import wanted  # noqa: E402


def sections() -> Iterator[tuple[str, list[settings_table.Setting]]]:
    """The settings by section, in the table's order."""
    names = dict.fromkeys(setting.section for setting in settings_table.rows().values())
    for name in names:
        yield name, [setting for setting in settings_table.rows().values() if setting.section == name]


def literal(value: object) -> str:
    """A default as YAML writes it."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def of_profiles(setting: settings_table.Setting) -> str:
    return ", ".join(f"{profile} {literal(getattr(setting, profile))}" for profile in settings_table.PROFILE_NAMES)


def empty_means(setting: settings_table.Setting) -> str:
    """The meaning of an empty value of a setting."""
    return of_profiles(setting) if setting.from_profile else setting.empty


def group_vars() -> str:
    """inventory/group_vars/trainers.yml: all comments, since a value here would win over hosts.yml."""
    lines = [
        "---",
        "# Every setting of a job, with its default (of the profile real, where they differ). Copy those that you want to change to",
        "# hosts.yml, without the `# `: below `vars:`, or beside the name of a host for one of the last section. One that you uncomment",
        "# here wins over `vars:` in hosts.yml. For one run only: -e ddp_profile=real -e ddp_iterations=100",
    ]
    for section, settings in sections():
        lines += ["", "", f"# == {section}"]
        for setting in settings:
            choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
            kind = "Default" if setting.from_profile else "Empty"
            empty = f" {kind}: {empty_means(setting)}." if empty_means(setting) else ""
            about = f"{setting.why}{choices}{empty}"
            lines += ["", *textwrap.wrap(about, WIDTH, initial_indent="# ", subsequent_indent="# ")]
            value = setting.real if setting.from_profile else setting.default
            lines.append(f"# {setting.name}: {literal(value)}".rstrip())
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by tools/generate_docs.py from plugins/module_utils/_contract/settings_table.py. -->",
        "",
        "Variables of the inventory, all of them optional. Set them in `inventory/hosts.yml`: those of the last section beside a host's",
        "name, all others, which belong to the run, below `vars:` of the group `trainers`; for one run with `-e`, which wins. An empty",
        "value counts as unset. `inventory/group_vars/trainers.yml` holds all of them as comments, to copy from; one that you",
        "uncomment there wins over `vars:` in hosts.yml.",
        "Any other variable `ddp_*` is refused, and the nearest name suggested.",
        "",
        "## Profiles",
        "",
        "`ddp_profile` fills in what is left empty: `smoke` is a trial of a few seconds, `real` a training of days. A setting that is",
        "given always wins over the profile.",
        "",
        "| setting | " + " | ".join(settings_table.PROFILE_NAMES) + " |",
        "|---|" + "---|" * len(settings_table.PROFILE_NAMES),
    ]
    for setting in settings_table.rows().values():
        if setting.from_profile:
            values = " | ".join(literal(getattr(setting, profile)) for profile in settings_table.PROFILE_NAMES)
            lines.append(f"| `{setting.name}` | {values} |")
    for section, settings in sections():
        lines += ["", f"## {section}", "", "| setting | default | what for | takes |", "|---|---|---|---|"]
        lines += [row(setting) for setting in settings]
    return "\n".join([*lines, *removed()]) + "\n"


def removed() -> Iterator[str]:
    """The settings of earlier versions, and what to write instead."""
    yield from ("", "## Removed settings, and what to write instead", "")
    yield "A removed setting that is empty, or asks for what is done now anyway, is ignored. Any other value is refused."
    yield from ("", "| no longer a setting | because |", "|---|---|")
    for name, (instead, *dummy) in settings_table.REMOVED_SETTINGS.items():
        yield f"| `{name}` | {instead} |"


def row(setting: settings_table.Setting) -> str:
    default = setting.empty or f"`{literal(setting.default)}`"
    return f"| `{setting.name}` | {default} | {setting.why} | {wanted(setting)} |"


def troubleshooting_page() -> str:
    """docs/troubleshooting.md: what it says of each code, below what is written there by hand."""
    catalogue = findings_table.CATALOGUE
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    lines = [page.partition("## By code")[0] + "## By code"]
    for code in sorted(catalogue):
        kind = catalogue[code]
        lines += [
            "",
            f"### {code}",
            "",
            f"**{kind.title}** ({kind.severity}). {kind.why}",
            "",
            f"What to do: {kind.remedy}",
        ]
    return "\n".join(lines) + "\n"


# In the order in which one needs them.
PLAYBOOKS = (
    "plan",
    "preflight",
    "train",
    "status",
    "logs",
    "doctor",
    "stop",
    "leave",
    "join",
    "collect",
    "chat",
    "reset",
)
OPTION = re.compile(r"""-e (?:'[^']*'|\w+=[\w.,/"-]*[\w/"-])(?: -e \w+=[\w.,/"-]*[\w/"-])*""")


def playbooks_page() -> str:
    """docs/playbooks.md: the comment at the head of each playbook."""
    lines = [
        "# Playbooks",
        "",
        "<!-- Written by tools/generate_docs.py from playbooks/. -->",
        "",
        "Each is called as `ansible-playbook nanochat.ddp.NAME -i INVENTORY`; in the checkout, `train` also as `train.yml`.",
        "All of them take every setting ([settings.md](settings.md)) with `-e`, and `-e target=HOST,HOST` for other hosts than the group",
        "`trainers`; those that look at a run take `-e ddp_run=NAME` for another one than the newest. The steps of `train` and their",
        "tags are in [start.md](start.md#what-trainyml-does).",
    ]
    for name in PLAYBOOKS:
        text = (ROOT / f"playbooks/{name}.yml").read_text(encoding="utf-8")
        comment = "".join(re.findall(r"\A---\n((?:#.*\n)+)", text))
        # Options are set as code, except in text that is code already.
        words = " ".join(line.lstrip("# ") for line in comment.splitlines()).split("`")
        about = "`".join(part if at % 2 else OPTION.sub(r"`\g<0>`", part) for at, part in enumerate(words))
        lines += ["", f"## {name}", "", about]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "inventory/group_vars/trainers.yml": group_vars,
    "docs/settings.md": settings_page,
    "docs/troubleshooting.md": troubleshooting_page,
    "docs/playbooks.md": playbooks_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
