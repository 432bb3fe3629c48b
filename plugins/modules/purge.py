#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: purge
short_description: Remove what jobs keep on a host
version_added: 0.1.0
description:
  - Removes the folder of one run, or everything that this collection keeps below a base folder except the trainer's Python.
  - Removes only files with this collection's marks (a run's plan, a data set's manifest, the record of copied files); other files stay and
    are listed.
  - Refuses while a session or training that uses the files is alive.
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  base_dir:
    description: The base folder.
    type: path
    required: true
  what:
    description: V(run) for the folder of O(run), V(all) for all runs, data sets, packages, trainer's files and the tracker.
    type: str
    choices: [run, all]
    required: true
  run:
    description: Name of the run, for O(what=run).
    type: str
"""

EXAMPLES = r"""
- name: Remove the run's folder, checkpoints included
  nanochat.ddp.purge:
    base_dir: /mnt/data/nanochat
    what: run
    run: d4

- name: Remove everything that jobs keep there
  nanochat.ddp.purge:
    base_dir: /mnt/data/nanochat
    what: all
"""

RETURN = r"""
removed:
  description: What was removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [/mnt/data/nanochat/runs/d4]
brief:
  description: The same in a line, runs and data sets by their names, copied files by their folder and number.
  returned: always
  type: str
  sample: "in /mnt/data/nanochat: runs/{d4,d8}, trainer/ (73 files), measured.json"
stayed:
  description: Other files in the places that this collection uses.
  returned: success
  type: list
  elements: str
  sample: [/mnt/data/nanochat/data/photos]
"""

from ..module_utils._contract.run_folder import RunNameError
from ..module_utils._kit.arguments import checked_module
from ..module_utils._run.purge import PurgeError, purge
from ..module_utils._session.tmux import end_sessions


def main() -> None:
    module = checked_module(
        argument_spec={
            "base_dir": {"type": "path", "required": True},
            "what": {"type": "str", "choices": ["run", "all"], "required": True},
            "run": {"type": "str"},
        },
        required_if=[("what", "run", ["run"])],
        supports_check_mode=True,
    )
    given = module.params
    try:
        result = purge(given["base_dir"], given["run"] or "", given["what"] == "all", module.check_mode, end_sessions)
    except (PurgeError, RunNameError) as error:
        module.fail_json(msg=str(error))
    removed = "".join(f"{path}\n" for path in result["removed"])
    module.exit_json(diff={"before": removed, "after": ""}, **result)


if __name__ == "__main__":
    main()
