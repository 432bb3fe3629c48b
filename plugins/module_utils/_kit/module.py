# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes a module's AnsibleModule, so that arguments over which Ansible itself fails end in a sentence, too."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ansible.module_utils import basic

# What Ansible raises for values of an unexpected type or size.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def ansible_module(**options: Any) -> Any:
    """An AnsibleModule; what it makes, nobody but its user may write, whatever the umask."""
    os.umask(os.umask(0) | 0o022)
    try:
        return basic.AnsibleModule(**options)
    except UNREADABLE as error:
        sys.stdout.write(
            json.dumps({"failed": True, "changed": False, "msg": f"An argument cannot be used: {error}"}) + "\n"
        )
        raise SystemExit(1) from None
