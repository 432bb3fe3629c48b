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

# There is an action plugin of this name, which does all the work.
