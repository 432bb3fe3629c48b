#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: run_folder
short_description: Prepare the run folder of a node
version_added: 0.1.0
description:
  - Makes the run folder and writes the plan into it as C(plan.json), whole or not at all.
  - If the run starts from scratch, because O(fresh) asks for it or because the trainer is not told to go on, what the earlier run
    wrote (metrics, logs, checkpoints) is moved to C(previous/1), C(previous/2) and so on in the same folder, with its plan.
    Nothing that was set aside is ever replaced.
  - Fails if training cannot resume from existing checkpoints with this plan, unless O(fresh=true).
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
options:
  path:
    description: The run folder.
    type: path
    required: true
  plan:
    description: The plan.
    type: dict
    required: true
  fresh:
    description: Whether to move the outputs of an earlier run aside although they could be continued.
    type: bool
    default: false
  state:
    description:
      - V(deployed) brings the folder to the plan.
      - V(ready) only makes it, and refuses what V(deployed) would refuse, so that a run that still goes on in it is not stopped in vain.
    type: str
    choices: [ready, deployed]
    default: deployed
  training:
    description:
      - Which training the folder is to hold, as M(nanochat.ddp.judge) returns it. What the folder holds of another one is moved aside.
      - Without it, whatever is there is gone on from.
    type: dict
    suboptions:
      id:
        description: Its id.
        type: str
        required: true
      number:
        description: By which the trainings of a run are ordered.
        type: int
        required: true
      begun:
        description: When it was begun, in seconds since 1970.
        type: int
        required: true
      goes_on:
        description: The id in a folder that it resumes; empty for a folder without an id, none for a new training.
        type: str
      base:
        description: The id of the training of the model that it begins with.
        type: str
      ends:
        description: When a run with a time to end at is over, in seconds since 1970 by the controller's clock.
        type: int
      now:
        description: The controller's clock now, by which the difference to the host's is found.
        type: float
  host:
    description: Which host of the plan this is; needed where the plan has keepers.
    type: str
  keeper_secret:
    description:
      - What the keepers of this start of the run prove to each other that they know. It is kept in a file that only the user may read.
      - Without it, or where the plan has no keepers, a keeper that was there is taken away.
    type: str
attributes:
  check_mode:
    description: Can run in check_mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    support: full
  idempotent:
    description: When run twice in a row with the same arguments, the second run does nothing.
    support: partial
    details: With O(fresh=true) each run moves the outputs made since the last one.
"""

EXAMPLES = r"""
- name: Prepare the run folder
  nanochat.ddp.run_folder:
    path: "{{ ddp_node.run_dir }}"
    plan: "{{ ddp_plan }}"
"""

RETURN = r"""
set_aside:
  description: Names of the outputs that were moved to RV(place), or would be in check mode.
  type: list
  elements: str
  returned: success
  sample: [base_checkpoints, log, metrics-rank0.jsonl]
place:
  description: The folder to which they were moved, or V(null).
  type: str
  returned: success
  sample: /mnt/data/nanochat/runs/d4/previous/1
checkpoint:
  description: The newest step among the checkpoints that were moved, or V(null) if there was none.
  type: int
  returned: success
  sample: 250
"""

from ..module_utils._keeper.deployment import OPTIONS, apply
from ..module_utils._kit.arguments import checked_module
from ..module_utils._run.folder import RunFolderError


def main() -> None:
    module = checked_module(argument_spec=OPTIONS, supports_check_mode=True)
    try:
        module.exit_json(**apply(module.params, module.check_mode))
    except RunFolderError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
