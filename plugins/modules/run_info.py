#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_info
short_description: Return the state of a host's share of a training run
version_added: 0.1.0
description:
  - Reads the run folder of a host and returns its state, progress, speed, share of time waiting, last checkpoint, and why it crashed if it did.
  - Works before, during and after the run. It needs only the files in the folder.
  - With O(wait) it answers as soon as something changes, so a watcher needs few calls.
extends_documentation_fragment:
  - nanochat.ddp.run
  - nanochat.ddp.reader
  - ansible.builtin.action_common_attributes
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  rank:
    description: The rank whose files are read. Without it the rank is found from the session's name or the files in the folder.
    type: int
  lines:
    description: How many of the last lines of the log to return.
    type: int
    default: 10
  plan:
    description: Whether to return the deployed plan too.
    type: bool
    default: false
  with_model:
    description: Whether to take the newest run that has a checkpoint, if the run is not named.
    type: bool
    default: false
  wait:
    description:
      - What the caller already knows. The module answers when it differs or the time is up.
    type: dict
    suboptions:
      state:
        description: The state that is known. The module answers at once if it changes.
        type: str
      step:
        description: The step that is known. The module answers after O(wait.at_least) seconds if it changes.
        type: int
      at_least:
        description: Wait at least this many seconds before answering for a new step.
        type: float
        default: 0
      timeout:
        description: Answer after this many seconds in any case.
        type: float
        default: 0
attributes:
  platform:
    platforms: posix
    support: full
seealso:
  - module: nanochat.ddp.run_watch
"""

EXAMPLES = r"""
- name: Look at the newest run of this host
  nanochat.ddp.run_info:
    base_dir: /mnt/data/nanochat
  register: seen

- name: Wait up to a minute for the first step
  nanochat.ddp.run_info:
    run_dir: /mnt/data/nanochat/runs/d4
    wait:
      state: running
      timeout: 60
"""

RETURN = r"""
plan:
  description: >-
    The plan as it was deployed, C(plan.json) of the run folder. Empty where there is none, or where what lies there is not what was written -
    torn, edited.
  returned: with O(plan)
  type: dict
run:
  description: What the host's share of the run is doing. Its keys are in C(module_utils/_run/state.py).
  returned: always
  type: dict
  sample: {state: running, run: d4, rank: 0, world: 2, step: 41, steps: 700, loss: 5.31, tokens_per_second: 4320.5, eta_seconds: 310.0}
"""

from ..module_utils._contract.run_folder import RunNameError
from ..module_utils._kit.arguments import answer_read_only
from ..module_utils._run.find import ONE_RUN
from ..module_utils._run.polling import BOUNDS, OPTIONS, read_run_info


def main() -> None:
    """Read the run folder and answer."""
    answer_read_only(read_run_info, (RunNameError,), argument_spec=OPTIONS, bounds=BOUNDS, **ONE_RUN)


if __name__ == "__main__":
    main()
