#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_log
short_description: Read a rank's log, and follow it
version_added: 0.1.0
description:
  - Returns the last lines of a rank's log, or those from an offset on, and can wait for new ones.
  - With O(follow) prints the lines as they arrive, each with its host, until the run ends. Follows all hosts at the same time, even more
    than Ansible's C(forks), unless a folder is given.
  - Without O(run_dir) and O(base_dir) the run is the one that the host's C(ddp_base_dir) and C(ddp_run) mean.
extends_documentation_fragment:
  - nanochat.ddp.run
  - nanochat.ddp.reader
  - nanochat.ddp.reader.looks
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  rank:
    description: The rank whose log is read. Without it the rank is found from the session's name or the files in the folder.
    type: int
  lines:
    description: How many of the last lines to return without O(offset).
    type: int
    default: 20
  offset:
    description: Return what comes after this many bytes.
    type: int
  wait:
    description: Wait at most this many seconds for new lines, while the run is alive.
    type: float
    default: 0
  follow:
    description: Print the lines until the run ends.
    type: bool
    default: false
attributes:
  action:
    description: O(follow) runs on the controller.
    support: full
seealso:
  - module: nanochat.ddp.run_info
"""

EXAMPLES = r"""
- name: Follow the log to the end of the run
  nanochat.ddp.run_log:
    follow: true
    wait: 5
"""

RETURN = r"""
lines:
  description: The lines, as text without terminal codes; with O(follow) the last ones.
  returned: always
  type: list
  elements: str
offset:
  description: Where the next lines begin.
  returned: always
  type: int
over:
  description: Whether the run has ended and everything was read. Without O(follow) and O(offset), only whether the run has ended.
  returned: always
  type: bool
state:
  description: State of the run as M(nanochat.ddp.run_info) has it.
  returned: always
  type: str
log:
  description: Path of the log; null where there is no run.
  returned: always
  type: str
"""

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RunNameError
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import answer_read_only
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import ONE_RUN
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log import BOUNDS, OPTIONS, read_log


def main() -> None:
    """Read the log and answer."""
    answer_read_only(read_log, (RunNameError,), argument_spec=OPTIONS, bounds=BOUNDS, **ONE_RUN)


if __name__ == "__main__":
    main()
