#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: root_access
short_description: Check whether the task's become settings give root rights
version_added: 0.1.0
description:
  - Reads the user id under which the task's become settings run a command, with the password of C(--ask-become-pass) or
    C(ansible_become_password) where one was given.
  - Unlike other tasks with C(become), it does not fail if sudo needs a password and none was given. RV(root) is
    V(false) then, and RV(why) says why.
options: {}
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
extends_documentation_fragment:
  - nanochat.ddp.reader
  - nanochat.ddp.reader.looks
  - ansible.builtin.action_common_attributes
attributes:
  action:
    description: It runs one command over the connection and copies no module to the host.
    support: full
  become:
    description: The task's become settings are tested.
    support: full
seealso:
  - module: nanochat.ddp.host_info
"""

EXAMPLES = r"""
- name: Test the password for root
  nanochat.ddp.root_access:
  become: true
  register: access
"""

RETURN = r"""
root:
  description: Whether the command ran as root.
  returned: always
  type: bool
given:
  description: Whether a password was given, by C(--ask-become-pass) or C(ansible_become_password).
  returned: always
  type: bool
why:
  description: If it did not run as root, the message of sudo or Ansible.
  returned: always
  type: str
  sample: Missing sudo password
"""

# There is an action plugin of this name, which does all the work.
