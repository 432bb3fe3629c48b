#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_files
short_description: Copy metrics, logs, plan and checkpoint of a run to the controller
version_added: 0.1.0
description:
  - Copies the files that describe a run into a folder on the controller; only new parts of files that are already there.
  - Works during the run. Files are replaced atomically, metrics and logs end with a complete line, and every chunk is verified by its digest.
  - Secret environment variables are masked before they leave the host.
extends_documentation_fragment:
  - nanochat.ddp.changer
  - nanochat.ddp.run
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  dest:
    description: Folder on the controller. The files go to C(RUN/HOST/) below it.
    type: str
    required: true
  checkpoints:
    description: Whether to copy the newest checkpoint's model too.
    type: bool
    default: false
  have:
    description: What the controller already has; set by the action plugin.
    type: dict
    default: {}
  room:
    description: Approximate maximum size of one answer in bytes.
    type: int
    default: 4000000
attributes:
  action:
    description: It runs on the controller and asks the host for what is missing.
    support: full
  async:
    description: It works in pieces.
    support: none
  bypass_host_loop:
    description: It runs for each host.
    support: none
  diff_mode:
    description: Copied metrics and logs are not worth showing.
    support: none
  platform:
    platforms: posix
    support: full
seealso:
  - module: nanochat.ddp.report
"""

EXAMPLES = r"""
- name: Copy everything of the newest run
  nanochat.ddp.run_files:
    base_dir: /mnt/data/nanochat
    dest: ./runs
"""

RETURN = r"""
run:
  description: Name of the run; null when there is none on the host.
  returned: always
  type: str
folder:
  description: Where on the controller the files are.
  returned: always
  type: str
files:
  description: Paths of what was written, relative to the folder.
  returned: always
  type: list
  elements: str
"""

from ..module_utils._contract.run_folder import RunNameError
from ..module_utils._kit.arguments import answer_read_only
from ..module_utils._run.files import BOUNDS, OPTIONS, CopyError, read_run_files
from ..module_utils._run.find import ONE_RUN


def main() -> None:
    """Answer with what the controller lacks."""
    answer_read_only(read_run_files, (RunNameError, CopyError), argument_spec=OPTIONS, bounds=BOUNDS, **ONE_RUN)


if __name__ == "__main__":
    main()
