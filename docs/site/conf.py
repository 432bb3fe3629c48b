# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of the docs site; tools/docs.sh lays out what it is made from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

project = "nanochat.ddp"
copyright = "The nanochat.ddp contributors"
# Version and repository stand in galaxy.yml alone. tools/docs.sh puts it beside this file, and all pages at their paths of the repository.
SOURCE = Path(__file__).parent
release, repository = re.findall(
    r"^(?:version|repository): (\S+)$", (SOURCE / "galaxy.yml").read_text(encoding="utf-8"), re.M
)
version = release
LINK = re.compile(r"(?<=\]\()[^)\s:#]+(?=(?:#[^)]*)?\))")
extensions = ["myst_parser", "sphinx_antsibull_ext"]
html_theme = "sphinx_ansible_theme"
html_title = "nanochat.ddp"
html_show_sphinx = False
html_theme_options = {
    "documentation_home_url": "index.html",
    "topbar_links": {},
    "navigation_depth": 3,
    "vcs_pageview_mode": "",
}
html_copy_source = False
# Headings of all pages can be linked to, as on a web page of the repository.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# A console block shows what was typed and what came; it is not one language throughout.
suppress_warnings = ["misc.highlighting_failure"]
exclude_patterns: list[str] = []

# What generated pages refer to in Ansible's own documentation and elsewhere.
ELSEWHERE = {
    "common_return_values": "https://docs.ansible.com/projects/ansible/latest/reference_appendices/common_return_values.html",
    "ansible_configuration_settings": "https://docs.ansible.com/projects/ansible/latest/reference_appendices/config.html",
    "action_plugins": "https://docs.ansible.com/projects/ansible/latest/plugins/action.html",
    "callback_plugins": "https://docs.ansible.com/projects/ansible/latest/plugins/callback.html",
    "NO_COLOR": "https://no-color.org/",
}


def lead_elsewhere(app: Any, environment: Any, node: Any, content: Any) -> Any:
    """A link for a reference that no page of this site answers."""
    address = ELSEWHERE.get(str(node.get("reftarget")))
    return nodes.reference("", content.astext(), refuri=address) if address else None


def lead_to_repository(app: Any, page: str, text: list[str]) -> None:
    """Links to files that are no pages of this site, and to folders, lead to the repository."""

    def address(found: re.Match[str]) -> str:
        path = (SOURCE / page).parent / found[0]
        return found[0] if path.is_file() else f"{repository}/blob/main/{path.resolve().relative_to(SOURCE).as_posix()}"

    text[0] = LINK.sub(address, text[0])


def setup(app: Any) -> None:
    app.connect("source-read", lead_to_repository)
    app.connect("missing-reference", lead_elsewhere)
