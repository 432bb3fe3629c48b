#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: chat
short_description: Open a prompt on a checkpoint of a run
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Builds the command to chat with the newest checkpoint of a run folder, over the host's own ssh connection or on the controller.
  - A task has no terminal. The display P(nanochat.ddp.story#callback) runs the command in the terminal when the playbook has ended. Another
    display, or a play without a terminal, prints the command.
options:
  run_dir:
    description: The run folder, which holds C(base_checkpoints) and C(tokenizer).
    type: str
    required: true
  trainer_dir:
    description: The folder of this collection's trainer on the host.
    type: str
    required: true
  python:
    description: The Python of the trainer's environment on the host.
    type: str
    required: true
  flags:
    description: Further flags of C(scripts.chat_cli).
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - nanochat.ddp.reader
seealso:
  - module: nanochat.ddp.run_info
"""

EXAMPLES = r"""
- name: Chat with the model
  nanochat.ddp.chat:
    run_dir: /mnt/data/nanochat/runs/d4
    trainer_dir: /mnt/data/nanochat/trainer
    python: /mnt/data/nanochat/venv/bin/python
    flags: [--temperature=0.6, --top-k=50]
"""

RETURN = r"""
terminal:
  description: The command, which needs a terminal.
  returned: success
  type: list
  elements: str
remote:
  description: Whether its output comes from another machine, so that the display filters it.
  returned: success
  type: bool
line:
  description: The command as one line for a shell.
  returned: success
  type: str
  sample: ssh -o ControlPersist=60s -tt desktop 'cd /mnt/data/nanochat/trainer && ...'
"""
