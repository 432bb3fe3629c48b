# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: readable
short_description: Report a YAML syntax error in an inventory in one sentence
version_added: 0.1.0
description:
  - Reads no inventory itself. Enabled before the plugins that do, it stops Ansible at a file that is not YAML and says which line
    is wrong and what to do.
    Without it Ansible shows what each of its plugins makes of the file.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options: {}
"""

EXAMPLES = r"""
# In ansible.cfg:
# [inventory]
# enable_plugins = nanochat.ddp.readable, host_list, script, auto, yaml, ini, toml
"""

import json
import sys
from pathlib import Path

import yaml
from ansible.plugins.inventory import BaseInventoryPlugin

REMEDY = (
    "Look there and in the line before for a missing bracket, quote, comma or colon, a tab or wrong indentation; "
    "inventory/hosts.yml of the collection is an example."
)
UNREADABLE = 4  # Ansible's own exit code for an inventory or playbook that it cannot parse


def problem_of(path: str) -> str | None:
    """Why a file is not YAML; None if it is, and for other kinds of inventory."""
    if not path.endswith((".yml", ".yaml")):
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not text.lstrip().startswith("{") or not _is_json(text):
            yaml.compose(text, yaml.SafeLoader)
    except OSError:
        return None  # Ansible reports this well
    except UnicodeDecodeError:
        return f"The inventory {path} is not written in UTF-8; save it in that encoding."
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}," if mark else ""
        begun = f" {error.context}" if error.context else ""
        since = f" that begins in line {error.context_mark.line + 1}" if error.context_mark and begun else ""
        what = f"{error.problem or 'it is no YAML'}{begun}{since}"
        return f"The inventory {path} cannot be read:{place} {what}. {REMEDY}"
    except yaml.YAMLError as error:
        return f"The inventory {path} cannot be read: {error}; remove that character."
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class InventoryModule(BaseInventoryPlugin):
    """Takes no file, and ends Ansible at one that no plugin could take."""

    NAME = "nanochat.ddp.readable"

    def verify_file(self, path: str) -> bool:
        """Ansible tries all plugins whatever exception one raises, so this ends it."""
        problem = problem_of(str(path))
        if problem:
            sys.stderr.write(f"{problem}\n")
            raise SystemExit(UNREADABLE)
        return False
