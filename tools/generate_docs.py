# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the pages that are made from tables in the code; with --check it only says which are out of step.

Run from any checkout: tools/generate_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

WIDTH = 140
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ansible" / "collections"), str(ROOT / "tools")]

import floor_plan  # noqa: E402
import playbook_page  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._contract import findings, settings_table  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.settings_types import wanted  # noqa: E402


def sections() -> Iterator[tuple[str, list[settings_table.Setting]]]:
    """The settings by section, in the table's order."""
    names = dict.fromkeys(setting.section for setting in settings_table.SETTINGS)
    for name in names:
        yield name, [setting for setting in settings_table.SETTINGS if setting.section == name]


def literal(value: object) -> str:
    """A default as YAML writes it."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def of_profiles(setting: settings_table.Setting) -> str:
    return ", ".join(f"{profile} {values[setting.name]}" for profile, values in settings_table.PROFILES.items())


def empty_means(setting: settings_table.Setting) -> str:
    """What it means to leave a setting empty."""
    if any(setting.name in values for values in settings_table.PROFILES.values()):
        return of_profiles(setting)
    return setting.empty


def group_vars() -> str:
    """inventory/group_vars/trainers.yml."""
    lines = [
        "---",
        "# Every setting of a job. What is left empty comes from ddp_profile or is worked out by the plan; see also docs/settings.md.",
        "# One run only: ansible-playbook train.yml -i inventory -e ddp_profile=real -e ddp_iterations=100",
    ]
    for section, settings in sections():
        lines += [
            "",
            "",
            f"# == {section}" + (": set these for a host, in hosts.yml" if section == "Each host" else ""),
        ]
        for setting in settings:
            empty = empty_means(setting)
            choices = f" One of {', '.join(setting.choices)}." if setting.choices else ""
            why, otherwise = f"# {setting.why}{choices}", f"Empty: {empty}." if empty else ""
            together = f"{why} {otherwise}".rstrip()
            lines += [
                "",
                *([together] if len(together) <= WIDTH else [why, *([f"# {otherwise}"] if otherwise else [])]),
            ]
            mark = "# " if setting.scope == settings_table.HOST else ""
            lines.append(f"{mark}{setting.name}: {literal(setting.default)}".rstrip())
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by tools/generate_docs.py from plugins/module_utils/_contract/settings_table.py. -->",
        "",
        "Variables of the inventory, all of them optional. Those of a host may differ from host to host; all others belong to the run and",
        "must be the same everywhere: set them for the group, in `inventory/group_vars/`, or with `-e` for one run. An empty value is as",
        "good as none.",
        "A variable `ddp_*` that is not here is refused, with the name that is nearest.",
        "",
        "## Profiles",
        "",
        "`ddp_profile` fills in what is left empty: `smoke` is a trial of a few seconds, `real` a training of days. A setting that is",
        "given always wins over the profile.",
        "",
        "| setting | " + " | ".join(settings_table.PROFILES) + " |",
        "|---|" + "---|" * len(settings_table.PROFILES),
    ]
    for name in settings_table.PROFILES["smoke"]:
        lines.append(
            f"| `{name}` | " + " | ".join(str(values[name]) for values in settings_table.PROFILES.values()) + " |"
        )
    for section, settings in sections():
        lines += ["", f"## {section}", "", "| setting | default | what for | takes |", "|---|---|---|---|"]
        lines += [row(setting) for setting in settings]
    return "\n".join(lines) + "\n"


def row(setting: settings_table.Setting) -> str:
    profile = any(setting.name in values for values in settings_table.PROFILES.values())
    default = "profile" if profile else setting.empty or f"`{literal(setting.default)}`"
    return f"| `{setting.name}` | {default} | {setting.why} | {wanted(setting)} |"


def troubleshooting_page() -> str:
    """docs/troubleshooting.md."""
    catalogue = findings.CATALOGUE
    lines = [
        "# Troubleshooting",
        "",
        "<!-- Written by tools/generate_docs.py from plugins/module_utils/_contract/findings.py. -->",
        "",
        "What the plan, preflight, watch and the doctor can find, by the code that they print. An error stops a run before it starts, a",
        "warning does so with `ddp_strict=true`.",
        "",
        "- Before a run: `ansible-playbook nanochat.ddp.preflight -i INVENTORY`",
        "- A run that is stuck or died: `ansible-playbook nanochat.ddp.doctor -i INVENTORY`",
        "",
        "| exit code | preflight | doctor | train.yml |",
        "|---|---|---|---|",
        "| 0 | no error was found (with `ddp_strict=true`: no warning either) | all ranks are healthy or only slow, or none runs | the run "
        "finished, or was stopped, or with `-e watch=false` made its first step |",
        "| 2 | an error was found; nothing is left behind | the verdict is an error | nothing was started because of an error, or the run "
        "crashed or is stuck |",
        "",
        "Any other code but 0 is Ansible's own: 4 where a host could not be reached at all, 1 or 250 where Ansible itself failed.",
        "",
        "## By the words of an error",
        "",
        "| seen | look at |",
        "|---|---|",
    ]
    texts = dict.fromkeys(text for kind in catalogue.values() for text in kind.seen_as)
    for text in sorted(texts, key=str.lower):
        codes = [f"[{code}](#{code})" for code, kind in catalogue.items() if text in kind.seen_as]
        lines.append(f"| `{text}` | {', '.join(codes)} |")
    lines += ["", "## By code"]
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
        if kind.seen_as:
            lines += ["", "Seen as: " + ", ".join(f"`{text}`" for text in kind.seen_as)]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "inventory/group_vars/trainers.yml": group_vars,
    "docs/settings.md": settings_page,
    "docs/troubleshooting.md": troubleshooting_page,
    "docs/images/floors.svg": floor_plan.picture,
    "docs/playbooks.md": playbook_page.page,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is out of step; run tools/generate_docs.py' if '--check' in sys.argv[1:] else 'written'}.")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
