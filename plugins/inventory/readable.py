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

import sys

from ansible.errors import AnsibleParserError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.inventory import BaseInventoryPlugin

REMEDY = (
    "Look there and in the line before for a missing bracket, quote, comma or colon, a tab or wrong indentation; "
    "inventory/hosts.yml of the collection is an example."
)
UNREADABLE = 4  # Ansible's own exit code for an inventory or playbook that it cannot parse


class InventoryModule(BaseInventoryPlugin):
    """Takes no file, and ends Ansible at one that no plugin could take."""

    NAME = "nanochat.ddp.readable"

    def verify_file(self, path: str) -> bool:
        """Ansible tries all plugins whatever exception one raises, so this ends it."""
        if str(path).endswith((".yml", ".yaml")) and super().verify_file(path):
            try:
                DataLoader().load_from_file(str(path))
            except AnsibleParserError as error:
                # With line and column, which Ansible itself loses on the way.
                sys.stderr.write(f"The inventory {error.obj} cannot be read: {error} {REMEDY}\n")
                raise SystemExit(UNREADABLE) from None
        return False
