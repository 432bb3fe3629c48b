#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: agent_program
short_description: Run a verb of this collection as a program
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - The action M(nanochat.ddp.agent) sends verbs through the pipe of a connection, and calls this module where there is none.
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  program:
    description: The program, in Python.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Run a program
  nanochat.ddp.agent_program:
    program: print("hello")
"""

RETURN = r"""
stdout:
  description: What the program wrote, the answer in its last line.
  returned: always
  type: str
stderr:
  description: What it wrote about its errors.
  returned: always
  type: str
"""

import sys

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Run it in a Python that loads nothing else."""
    spec = {"program": {"type": "str", "required": True, "no_log": True}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    dummy, out, err = module.run_command([sys.executable, "-I", "-S", "-"], data=module.params["program"])
    module.exit_json(changed=False, stdout=out, stderr=err)


if __name__ == "__main__":
    main()
