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
  - Returns the last lines of the log of a host's rank, or those from an offset on, and waits for new ones if told to.
  - In an C(until) loop with O(follow) every look goes on where the last one ended. The display P(nanochat.ddp.story#callback) shows the lines as they come.
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
    description: How many of the last lines to return where no O(offset) is given.
    type: int
    default: 20
  offset:
    description: Return what comes after this many bytes.
    type: int
  wait:
    description: Wait for new lines for at most this many seconds, while the run goes on.
    type: float
    default: 0
  follow:
    description: In an C(until) loop, go on where the last look ended.
    type: bool
    default: false
attributes:
  action:
    description: What O(follow) does happens on the controller.
    support: full
seealso:
  - module: nanochat.ddp.run_info
"""

EXAMPLES = r"""
- name: Follow the log to the end of the run
  nanochat.ddp.run_log:
    base_dir: /mnt/data/nanochat
    follow: true
    wait: 5
  register: read
  until: read.over
  retries: 1000000
  delay: 0
"""

RETURN = r"""
lines:
  description: The lines, as text without terminal codes.
  returned: always
  type: list
  elements: str
offset:
  description: Where the next lines begin.
  returned: always
  type: int
over:
  description: Whether the run has ended and all was read. Without O(follow) and O(offset) it tells only whether the run goes on.
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

from typing import Dict

from ansible_collections.nanochat.ddp.plugins.module_utils._contract.run_folder import RunNameError
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.arguments import checked_module
from ansible_collections.nanochat.ddp.plugins.module_utils._run.find import ONE_RUN, WHICH_RUN
from ansible_collections.nanochat.ddp.plugins.module_utils._run.log import read_log

ARGUMENTS: Dict[str, object] = dict(
    **WHICH_RUN,
    rank=dict(type="int"),
    lines=dict(type="int", default=20),
    offset=dict(type="int"),
    wait=dict(type="float", default=0.0),
    follow=dict(type="bool", default=False),
)


def main() -> None:
    """Read the log and answer."""
    module = checked_module(
        argument_spec=ARGUMENTS,
        **ONE_RUN,
        bounds={"lines": (0, 100000), "rank": (0, 1000000), "offset": (0, 2**62), "wait": (0, 3600)},
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **read_log(module.params))
    except RunNameError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
