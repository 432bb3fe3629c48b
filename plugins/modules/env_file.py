#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: env_file
short_description: Write environment variables to a file that a shell can source
version_added: 0.1.0
description:
  - Writes a dictionary as a file of assignments that any POSIX shell reads with C(set -a; . ./env).
  - Each value reaches a process byte for byte, including spaces, quotes, dollar signs, newlines (also the last one) or bytes that are not UTF-8.
  - The file is replaced atomically and is never readable by more users than O(mode) allows, not even for a moment.
extends_documentation_fragment:
  - nanochat.ddp.changer
attributes:
  diff_mode:
    description: Returns what has changed or would change. Secrets and removed values are masked; a changed secret is marked as changed.
    support: full
options:
  path:
    description: The file. Its folder must exist.
    type: path
    required: true
  env:
    description:
      - The whole environment of the file; other variables in it are removed.
      - Names consist of letters, digits and C(_), and do not start with a digit. Variables that shells set themselves, such as
        E(UID) or E(PWD), are refused.
      - Values are text or numbers. Put V(true), V(false) and V(null) in quotes.
      - Required when O(state=present).
    type: dict
  secrets:
    description:
      - Names in O(env) whose values must never be shown. They are masked in the diff, the result and logs.
    type: list
    elements: str
    default: []
  mode:
    description:
      - The file's mode, as octal digits in quotes.
      - With O(secrets), modes that let everybody read the file are refused.
    type: str
    default: '0600'
  state:
    description: Whether the file exists.
    type: str
    choices: [present, absent]
    default: present
seealso:
  - module: nanochat.ddp.tmux_session
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
"""

EXAMPLES = r"""
- name: The environment of rank 0
  nanochat.ddp.env_file:
    path: /mnt/data/nanochat/runs/d4/env
    env:
      OMP_NUM_THREADS: 8
      GLOO_SOCKET_IFNAME: enp4s0
      GREETING: |
        It's "free" at $HOME,
        with a newline at the end.
      WANDB_API_KEY: "{{ wandb_api_key }}"
    secrets:
      - WANDB_API_KEY

- name: No environment is left behind
  nanochat.ddp.env_file:
    path: /mnt/data/nanochat/runs/d4/env
    state: absent
"""

RETURN = r"""
# Nothing besides what all modules return.
"""

from typing import Any, Mapping

from ansible.module_utils.basic import AnsibleModule

from ..module_utils._kit.env_file import ERRORS, MASK, NEEDED, OPTIONS, env_file
from ..module_utils._kit.module import ansible_module


def hide(module: AnsibleModule, secrets: list[str]) -> None:
    """From here on mask the secrets instead of every value that the option holds."""
    module.no_log_values.clear()
    # A short secret would also blot out the same letters in names and paths; it is never part of what is returned.
    values = (str((module.params["env"] or {}).get(name, "")) for name in secrets)
    module.no_log_values.update(value for value in values if len(value) >= 8)


def masked(params: Mapping[str, Any]) -> dict[str, object]:
    """The options without the secrets' values, as they may be returned."""
    env = {name: MASK if name in params["secrets"] else value for name, value in (params["env"] or {}).items()}
    return {**params, "env": env}


def main() -> None:
    module = ansible_module(argument_spec=OPTIONS, required_if=NEEDED, supports_check_mode=True)
    hide(module, module.params["secrets"])
    invocation = {"module_args": masked(module.params)}
    try:
        module.exit_json(invocation=invocation, **env_file(module.check_mode, **module.params))
    except ERRORS as error:
        module.fail_json(msg=str(error), invocation=invocation)


if __name__ == "__main__":
    main()
