#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: agent
short_description: Call a step of this collection's own roles
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - The roles of this collection call it, and nothing else should. Verbs, their parameters and answers change without notice.
  - A verb is a function of C(plugins/module_utils) that answers on a host, or one of C(plugins/plugin_utils/_agent) that takes the controller.
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  verb:
    description:
      - The name of the verb. They are listed in C(plugins/plugin_utils/_agent/verbs.py).
      - All further options are its parameters. Those whose names end in C(_dir), C(path) or C(dest) are paths, in which the host expands C(~).
    type: str
    required: true
  program:
    description: The verb as a program in Python, which this module runs. The action sets it where a connection has no pipe.
    type: str
"""

EXAMPLES = r"""
- name: Look at the newest run of this host
  nanochat.ddp.agent:
    verb: run_info
    base_dir: /mnt/data/nanochat
  register: seen
"""

RETURN = r"""
# The answer of the verb.
"""

import sys

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Run the program in a Python that loads nothing else."""
    spec = {"verb": {"type": "str", "required": True}, "program": {"type": "str", "no_log": True}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    dummy, out, err = module.run_command([sys.executable, "-I", "-S", "-"], data=module.params["program"])
    module.exit_json(changed=False, stdout=out, stderr=err)


if __name__ == "__main__":
    main()
