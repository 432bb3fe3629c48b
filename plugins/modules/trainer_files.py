#!/usr/bin/python
# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: trainer_files
short_description: Copy the trainer's files to a host
version_added: 0.1.0
author:
  - The nanochat.ddp contributors (@nanochat-ddp)
description:
  - Copies a source folder from the controller to a host in one step, sending only files that differ.
  - Removes files from earlier copies that are no longer in the source; leaves other files alone.
  - Skips hidden files, byte code, virtual environments and the like.
  - Fails, in check mode too, if a running session of this collection uses files that would change.
extends_documentation_fragment:
  - nanochat.ddp.changer
options:
  src:
    description: The folder on the controller.
    type: path
    required: true
  dest:
    description: The folder on the host.
    type: path
    required: true
  host:
    description: Name of this host in messages; by default its own host name.
    type: str
  files:
    description: SHA-256 digests of the files by path; filled in from O(src).
    type: dict
    default: {}
  contents:
    description: The files that differ, in base64; filled in from O(src).
    type: dict
"""

EXAMPLES = r"""
- name: Copy the trainer's files
  nanochat.ddp.trainer_files:
    src: "{{ playbook_dir }}/../trainer"
    dest: /home/xiaoxin/nanochat/trainer
"""

RETURN = r"""
digest:
  description: One short digest of all files; equal folders have equal digests.
  returned: success
  type: str
  sample: 0f343b0931126a20
written:
  description: Files that were (in check mode, would be) written.
  returned: success
  type: list
  elements: str
removed:
  description: Files that were (in check mode, would be) removed.
  returned: success
  type: list
  elements: str
"""

import os
import platform

from ..module_utils._kit.arguments import checked_module
from ..module_utils._trainer.files import TreeError, apply, compare, diffs, digest_of, is_inside, refuse_in_use

SPEC = {
    "src": {"type": "path", "required": True},
    "dest": {"type": "path", "required": True},
    "host": {"type": "str"},
    "files": {"type": "dict", "default": {}},
    "contents": {"type": "dict"},
}


def main() -> None:
    module = checked_module(argument_spec=SPEC, supports_check_mode=True)
    dest, wanted, contents = module.params["dest"], module.params["files"], module.params["contents"]
    host = module.params["host"] or platform.node()
    if not wanted or not all(is_inside(path) for path in wanted):
        module.fail_json(msg=f"{host}: there are no files to copy to {dest}; {module.params['src']} is empty")
    try:
        changes = compare(dest, wanted)
        result = {
            "changed": bool(changes.write or changes.remove),
            "digest": digest_of(wanted),
            "written": changes.write,
            "removed": changes.remove,
        }
        if result["changed"]:
            refuse_in_use(dest)
        if contents is not None:
            result["diff"] = diffs(dest, changes, contents)
            if result["changed"] and not module.check_mode:
                apply(dest, wanted, changes, contents)
    except TreeError as why:
        module.fail_json(msg=f"{host}: {why}")
    except OSError as why:
        module.fail_json(
            msg=f"{host}: {why.filename or dest}: {why.strerror or why}; the user with id {os.getuid()} must be able to "
            "write there"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
